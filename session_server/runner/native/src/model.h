// A decoder's weights as a step uses them, and the step itself.

#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "kernels.h"
#include "packed.h"
#include "team.h"

namespace session_server {

// Tokens, at most, that a convolution reads, the current one included.
constexpr long kMaxConvWidth = 16;

using Linear = std::shared_ptr<const Packed>;
using Floats = std::vector<float>;

struct Norm {
    Floats weight;
    float eps = 0.0f;
};

// What follows a mixer or ffn before its output is added: a norm, or a factor.
struct After {
    std::optional<Norm> norm;
    float factor = 1.0f;
};

struct GroupedQuery {
    Linear qkv;
    Linear output;
    long num_heads, num_kv_heads, head_dim;
    long rope;        // index of the model's rotary embeddings, -1 for none
    long rotary_dim;  // leading elements of a head that are rotated
    bool is_gated;
    AttentionRule rule;
    std::optional<Norm> head_norm;  // weight [heads + kv_heads][head_dim]
    std::optional<std::pair<Norm, Norm>> projection_norm;
    Floats sinks;
};

struct Latent {
    Linear down;
    std::optional<std::pair<Norm, Linear>> query;
    Norm norm;
    std::vector<Linear> to_latent;    // per head: [qk_nope_head_dim] -> [kv_lora_rank]
    std::vector<Linear> from_latent;  // per head: [kv_lora_rank] -> [v_head_dim]
    Linear output;
    long num_heads, qk_nope_head_dim, qk_rope_head_dim, kv_lora_rank, v_head_dim;
    long rope;
    AttentionRule rule;
};

struct ShortConv {
    Linear inputs, output;
    Floats taps, bias;
    long channels, width;
};

struct GatedDelta {
    Linear inputs, output;
    Floats taps, step_bias, rates;
    Norm norm;
    long num_key_heads, num_value_heads, key_head_dim, value_head_dim, width;
};

struct Mamba2 {
    Linear inputs, output;
    Floats taps, conv_bias, step_bias, rates, skip;
    Norm norm;  // weight [n_groups][inner / n_groups]
    long num_heads, head_dim, n_groups, state_size, width;
    float least_step, most_step;
};

using Mixer = std::variant<GroupedQuery, Latent, ShortConv, GatedDelta, Mamba2>;

struct GatedMlp {
    Linear gate_up, down;
    GateRule rule;
};

struct Experts {
    Linear router;
    Floats e_score_correction_bias;
    std::vector<GatedMlp> experts;  // alike: inputs are brought into one form for all of them
    std::optional<GatedMlp> shared;
    long num_experts_per_tok;
    bool is_sigmoid, norm_topk_prob;
    long n_group, topk_group;
    float routed_scaling_factor;
};

using Ffn = std::variant<GatedMlp, Experts>;

struct Layer {
    std::optional<Norm> before_mixer;
    Mixer mixer;
    After after_mixer;
    std::optional<Norm> before_ffn;
    Ffn ffn;
    After after_ffn;
    long pool;
    long in_pool;
};

// Rotary embeddings: radians per position of every pair, and the factor on their cosines and sines.
struct Rope {
    Floats frequencies;
    float factor;
};

// Where a pool keeps what layers store. Positions: keys and values of a layer and head begin at
// base + layer * layer_stride + head * head_stride, values `value_offset` behind their keys, in
// elements. States: parts [layers][pages][part_size].
struct Pool {
    bool is_state = false;
    void* base = nullptr;
    DType dtype = DType::kFloat32;
    long num_heads = 0, num_pages = 0, page_size = 0, dim = 0, value_dim = 0;
    long layer_stride = 0, head_stride = 0, value_offset = 0;
    const int32_t* table = nullptr;
    long table_stride = 0, num_rows = 0;
    std::vector<float*> parts;
    std::vector<long> part_sizes;
};

// Tokens [offset, offset + num_tokens) of a step: positions from `start` of a row of the tables.
// The state is read from page `source`, zero if that is page 0, and written to page `second` of
// every target at length `first`.
struct Span {
    long row, start, num_tokens, offset;
    long source = 0;
    std::vector<std::pair<long, long>> targets;
};

struct StepInputs {
    const int64_t* token_ids;
    const int64_t* positions;
    long num_tokens;
    const int64_t* slots;  // [pools of positions][num_tokens]
    std::vector<Span> spans;
    const int64_t* wanted;  // tokens whose hidden states are returned
    long num_wanted;
};

class Decoder {
  public:
    long hidden_size, vocab_size;
    const void* embedding;
    DType embedding_dtype;
    float embedding_scale;
    Norm norm;
    std::vector<Rope> ropes;
    std::vector<Layer> layers;
    std::vector<Pool> pools;

    // Compute all layers of a step. `hidden`: [num_wanted][hidden_size], normalized. Throws
    // std::out_of_range if a token is not in the vocabulary.
    void forward(Team& team, const StepInputs& step, float* hidden);

    // Make room for steps of up to num_tokens once all layers are there, and return the bytes that
    // steps work in: larger ones take more, and keep it.
    size_t reserve(const Team& team, long num_tokens);

    struct Memory;

  private:
    Memory& working_memory();

    std::shared_ptr<Memory> memory_;
};

// y[num_tokens][outputs] of x[num_tokens][inputs].
void apply_linear(Team& team, const Packed& weights, const float* x, long num_tokens, float* y);

// Bytes that are moved are worth a second thread.
bool is_worth_sharing(size_t num_bytes);

}  // namespace session_server
