// A step's way through the layers, on every member of a team.

#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include "memory.h"

namespace session_server {

// Up to `tile` panels of a linear from `first` on; members take tiles in turns.
inline Panels tile_of(const Member& me, const Packed& weights, long first, long tile) {
    return {first, std::min(first + tile, weights.panels()), first + tile * me.size()};
}

// The linears of a step, and how members of a team go through it.
class Step {
  public:
    Step(const Decoder& model, Decoder::Memory& memory, const StepInputs& inputs, Member& me)
        : model_(model), memory_(memory), in_(inputs), me_(me), kernels_(kernels()),
          num_tokens_(inputs.num_tokens), size_(model.hidden_size),
          hidden_(memory.hidden.get(0)), y_(memory.y.get(0)), z_(memory.z.get(0)),
          mixed_(memory.mixed.get(0)), scratch_{memory.scratch[me.index()].get(0)} {}

    // Compute all layers; `out` [num_wanted][hidden_size], normalized.
    void run(float* out);

  private:
    // ---- parts that layers share, in step.cpp ----

    void embed();
    const float* phases(long rope, long token) const;
    InputForm form_of(const Packed& weights) const { return kernels_.input_form(weights.format); }

    // Norm the hidden states for `weights`; without a norm, take them as they are.
    void prepare(const std::optional<Norm>& norm, std::initializer_list<const Packed*> weights);
    // Begin to read what a linear reads first: a member that waits leaves the memory no rest.
    void fetch(const Packed& weights);
    // Convert tokens of y [tokens][stride] that f(token, first, count, out) computes in segments.
    template <class Function>
    void convert(const Packed& weights, long num_tokens, long size, Function f) {
        const Inputs inputs = memory_.x.as(form_of(weights));
        const long segments = round_up(size, kSegment) / kSegment;
        me_.share(num_tokens * segments, [&](long item) {
            const long t = item / segments, first = item % segments * kSegment;
            const long count = std::min(kSegment, size - first);
            float* at = memory_.x.floats(t) + first;
            const float* values = f(t, first, count, at);
            kernels_.convert(values, count, segment(inputs, t, first), 0);
        }, [&] { fetch(weights); });
    }

    void linear(const Packed& weights, const Inputs& inputs, long num_tokens, float* y, long ldy,
                Write write);
    void linear(const Packed& weights, float* y) {
        linear(weights, memory_.x.as(form_of(weights)), num_tokens_, y, weights.outputs, {});
    }

    // Add a mixer's or ffn's last linear to the hidden states.
    void add_linear(const Packed& weights, const After& after);
    void add_normed(const After& after);

    const Pool& pool_of(const Layer& layer) const { return model_.pools[layer.pool]; }

    const int32_t* pages_of(const Pool& pool, const Span& span) const {
        return pool.table + span.row * pool.table_stride;
    }

    char* slot(const Layer& layer, long token, long element) const {
        const Pool& pool = pool_of(layer);
        const long slot = in_.slots[layer.pool * num_tokens_ + token];
        const long width = pool.dtype == DType::kFloat32 ? 4 : 2;
        return static_cast<char*>(pool.base) +
               (layer.in_pool * pool.layer_stride + slot * pool.dim + element) * width;
    }

    // ---- attention, in attention_layers.cpp ----

    // Attend with all rows. `queries` [tokens][heads][dim] lie `stride` apart from token to token.
    void attend(const Layer& layer, const AttentionRule& rule, const float* queries, long stride,
                long num_heads, const float* sinks, float* out);
    void mix(const Layer& layer, const GroupedQuery& mixer);
    void mix(const Layer& layer, const Latent& mixer);
    // Apply a linear of its own to each head: x[token * ldx + head * head_size] to
    // y[token * ldy + head * out_size].
    void by_head(const std::vector<Linear>& linears, long num_tokens, const float* x, long ldx,
                 long head_size, float* y, long ldy, long out_size);

    // ---- recurrences, in recurrent_layers.cpp ----

    // Convolve x[tokens][stride], n channels, of all rows into mixed_ [tokens][n], and keep the
    // last inputs of every target.
    void convolve(const Layer& layer, const float* x, long stride, long n, long width,
                  const Floats& taps, const Floats& bias);
    // Call f(state, token) for every token of every row and head, in order, with the state
    // [size] of the head, and keep it where targets say.
    template <class Function>
    void recur(const Layer& layer, long heads, long size, Function f);
    void mix(const Layer& layer, const ShortConv& mixer);
    void mix(const Layer& layer, const GatedDelta& mixer);
    void mix(const Layer& layer, const Mamba2& mixer);

    // ---- feed-forwards, in feed_forward_layers.cpp ----

    void feed(const Layer& layer, const GatedMlp& mlp);
    void convert_gated(const GatedMlp& mlp, long num_tokens);
    // Chosen experts are computed one choice after the other, sorted by expert, and added up per
    // token from the lowest expert on, so a sum does not depend on the other tokens.
    void feed(const Layer& layer, const Experts& moe);
    void by_expert(const Experts& moe, Linear GatedMlp::*which, const Inputs& inputs, float* y,
                   long ldy);
    // Choose the experts of a token: ids ascending in `order`, weights beside them.
    void choose(const Experts& moe, const float* logits, long t);
    // Order choices by expert; `slots_of_expert` then holds the place of every choice.
    void sort_choices(const Experts& moe);

    const Decoder& model_;
    Decoder::Memory& memory_;
    const StepInputs& in_;
    Member& me_;
    const Kernels& kernels_;
    const long num_tokens_, size_;
    float* const hidden_;
    float* const y_;      // what a first linear gives
    float* const z_;      // what comes between
    float* const mixed_;  // what attention or a recurrence gives
    const Scratch scratch_;
};

}  // namespace session_server
