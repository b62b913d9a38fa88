// The kernels of one instruction set, and what they are given.
//
// A kernel computes one piece of a step on one thread. What it writes depends on its own tokens
// alone, never on the others of the batch: sums run in the same order whatever the batch.

#pragma once

#include <cstdint>

#include "packed.h"

namespace session_server {

// Tokens' inputs to a linear, in the form that `Kernels::input_form` names for its weights.
// `stride`: elements from token to token, of every array but scales and sums.
struct Inputs {
    InputForm form = InputForm::kFloat32;
    const float* floats = nullptr;
    const uint16_t* bf16 = nullptr;
    const int8_t* codes = nullptr;    // `quad_bytes` for each four inputs
    const float* scales = nullptr;    // [tokens][stride / kBlock]
    const int32_t* sums = nullptr;    // of the codes of a block, likewise
    long stride = 0;
    long quad_bytes = 4;

    Inputs from(long token) const;
};

constexpr long kMaxQuadBytes = 8;

inline Inputs Inputs::from(long token) const {
    Inputs rest = *this;
    switch (form) {
        case InputForm::kFloat32: rest.floats += token * stride; break;
        case InputForm::kBFloat16: rest.bf16 += token * stride; break;
        case InputForm::kInt8:
            rest.codes += token * (stride / 4) * quad_bytes;
            rest.scales += token * (stride / kBlock);
            rest.sums += token * (stride / kBlock);
    }
    return rest;
}

// What becomes of the outputs of a linear: stored, or added times a factor.
struct Write {
    bool adds = false;
    float factor = 1.0f;
};

enum class Gate { kSilu, kGeluTanh, kClamped };

struct GateRule {
    Gate kind = Gate::kSilu;
    float alpha = 1.0f;
    float limit = 0.0f;
};

// Where the KV of a row lies, for one layer and one head. Position p is element
// `p % page_size` of page `pages[p / page_size]`; `stride` and `page_stride` count elements.
struct KvRows {
    const void* keys = nullptr;
    const void* values = nullptr;
    DType dtype = DType::kFloat32;
    const int32_t* pages = nullptr;
    long page_size = 1;
    long page_stride = 0;
    long stride = 0;
    long key_dim = 0;
    long value_dim = 0;
};

// `window`: positions a token sees, its own included; 0 for all. `softcap`: 0 for none.
struct AttentionRule {
    float scale = 1.0f;
    long window = 0;
    float softcap = 0.0f;
};

// The queries of one row that share one KV head: `num_tokens` tokens of the row from `position` on,
// each with `group` heads. Query (token, head) is at
// queries + token * query_stride + head * key_dim, its result at
// out + token * out_stride + head * value_dim.
struct Queries {
    const float* queries = nullptr;
    float* out = nullptr;
    long query_stride = 0;
    long out_stride = 0;
    long position = 0;  // of the first token
    long num_tokens = 1;
    bool is_alone = true;  // whether the row has no other new token
    long group = 1;
    const float* sinks = nullptr;  // [group], or null
};

// Panels [first, end) of a linear. Those from `next` on are fetched into the cache meanwhile, as many
// again: likely this thread reads them next.
struct Panels {
    long first = 0;
    long end = 0;
    long next = 0;
};

// Memory of one thread.
struct Scratch {
    float* floats = nullptr;
};

// Floats of scratch that `attend` needs for heads of these sizes.
constexpr long attention_scratch(long key_dim, long value_dim, long group) {
    const long lanes = 64 * (key_dim + value_dim + 64) + 64 * (key_dim + value_dim);
    const long heads = group * (key_dim + value_dim + 64 + 2);
    return lanes > heads ? lanes : heads;
}

struct Kernels {
    const char* name;
    InputForm (*input_form)(Format);
    // Panels that one pass of a linear over `num_tokens` takes at a time.
    long (*tile_panels)(Format, long num_tokens);
    // Bytes that four codes of inputs take.
    long quad_bytes;
    // Queries that fill the lanes of one call of `attend`.
    long lane_queries;
    // Bring [n] floats into `form` at token `token` of `inputs`, whose arrays are writable.
    void (*convert)(const float* x, long n, const Inputs& inputs, long token);
    // y[token * ldy + output] of `panels` of `weights`.
    void (*linear)(const Packed& weights, Panels panels, const Inputs& inputs, long num_tokens,
                   float* y, long ldy, Write write);
    void (*rms_norm)(const float* x, const float* weight, float eps, long n, float* y);
    // Rotate pairs (2i, 2i + 1) of x[n] by the angles of `phases`: n cosines, then n sines, both
    // twice per pair, those of even elements negated.
    void (*rotate)(float* x, const float* phases, long n);
    // out = act(gate) * up, [n] each.
    void (*gate)(const float* gate, const float* up, long n, const GateRule& rule, float* out);
    void (*sigmoid_times)(const float* gate, long n, float* x);
    void (*store_kv)(const float* x, long n, DType dtype, void* at);
    void (*attend)(const KvRows& kv, const AttentionRule& rule, const Queries& queries,
                   Scratch scratch);
    // The index of the largest of x[n], the lowest among equals; whether all are finite.
    long (*argmax)(const float* x, long n, bool* is_finite);
    // One token of a depthwise convolution: y[n] of `width` inputs and taps, oldest first.
    void (*convolve)(const float* const* inputs, const float* const* taps, const float* bias,
                     long width, long n, float* y);
    void (*silu)(float* x, long n);
    // One token of the gated delta rule on a state [keys][values].
    void (*delta_rule)(float* state, const float* q, const float* k, const float* v, float decay,
                       float write, long keys, long values, float* out, float* scratch);
    // One token of a state space on a state [dim][size]: out[dim] = state . read.
    void (*state_space)(float* state, const float* x, float decay, const float* write,
                        const float* read, long dim, long size, float* out);
};

// The kernels that `use` has chosen, or else the best that this CPU runs.
const Kernels& kernels();

// Use other kernels from the next step on. Packed weights fit all of them.
void use(const Kernels& table);

// Null if this build or this CPU has none of that name.
const Kernels* kernels_named(const char* name);

}  // namespace session_server
