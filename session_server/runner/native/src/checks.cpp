#include "checks.h"

#include <stdexcept>
#include <string>

namespace session_server {

namespace {

void expect(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("a layer does not fit: ") + what);
}

void expect_size(const Packed& weights, long outputs, long inputs, const char* what) {
    if (weights.outputs == outputs && weights.inputs == inputs) return;
    throw std::invalid_argument(
        "a layer does not fit: " + std::string(what) + " is [" + std::to_string(weights.outputs) +
        ", " + std::to_string(weights.inputs) + "] and not [" + std::to_string(outputs) + ", " +
        std::to_string(inputs) + "]");
}

void expect_norm(const Norm& norm, long size) {
    expect(static_cast<long>(norm.weight.size()) == size, "a norm has a weight for each element");
}

void expect_norm(const std::optional<Norm>& norm, long size) {
    if (norm) expect_norm(*norm, size);
}

void expect_floats(const Floats& floats, long size, const char* what) {
    expect(static_cast<long>(floats.size()) == size, what);
}

class Checks {
  public:
    Checks(const Decoder& decoder, const Layer& layer)
        : decoder_(decoder), layer_(layer), size_(decoder.hidden_size) {}

    void run() const {
        const long num_pools = static_cast<long>(decoder_.pools.size());
        expect(0 <= layer_.pool && layer_.pool < num_pools, "its pool exists");
        for (const auto* norm : {&layer_.before_mixer, &layer_.after_mixer.norm,
                                 &layer_.before_ffn, &layer_.after_ffn.norm}) {
            expect_norm(*norm, size_);
        }
        std::visit([&](const auto& mixer) { check(mixer); }, layer_.mixer);
        std::visit([&](const auto& ffn) { check(ffn); }, layer_.ffn);
    }

  private:
    const Pool& pool() const { return decoder_.pools[layer_.pool]; }

    void expect_rope(long rope, long rotary_dim) const {
        const long num_ropes = static_cast<long>(decoder_.ropes.size());
        expect(0 <= rope && rope < num_ropes, "its rotary embeddings exist");
        expect_floats(decoder_.ropes[rope].frequencies, rotary_dim / 2, "a pair has a frequency");
    }

    void check(const GroupedQuery& mixer) const {
        const long heads = mixer.num_heads, kv_heads = mixer.num_kv_heads, dim = mixer.head_dim;
        expect(heads > 0 && kv_heads > 0 && dim > 0 && heads % kv_heads == 0, "heads are groups");
        const long gates = mixer.is_gated ? heads : 0;
        expect_size(*mixer.qkv, (heads + 2 * kv_heads + gates) * dim, size_, "qkv_proj");
        expect_size(*mixer.output, size_, heads * dim, "o_proj");
        if (mixer.rope >= 0) {
            expect(mixer.rotary_dim <= dim, "no more is rotated than a head has");
            expect_rope(mixer.rope, mixer.rotary_dim);
        }
        expect_norm(mixer.head_norm, (heads + kv_heads) * dim);
        if (mixer.projection_norm) {
            expect_norm(mixer.projection_norm->first, heads * dim);
            expect_norm(mixer.projection_norm->second, kv_heads * dim);
        }
        expect(mixer.sinks.empty() || static_cast<long>(mixer.sinks.size()) == heads,
               "a head has a sink");
        expect(!pool().is_state && pool().num_heads == kv_heads && pool().dim == dim,
               "its pool keeps its heads");
    }

    void check(const Latent& mixer) const {
        const long nope = mixer.qk_nope_head_dim, rotary = mixer.qk_rope_head_dim;
        const long rank = mixer.kv_lora_rank, heads = mixer.num_heads;
        const long queries = heads * (nope + rotary);
        const long split = mixer.query ? mixer.query->second->inputs : queries;
        expect_size(*mixer.down, split + rank + rotary, size_, "q_a_proj and kv_a_proj");
        if (mixer.query) {
            expect_norm(mixer.query->first, split);
            expect_size(*mixer.query->second, queries, split, "q_b_proj");
        }
        expect_norm(mixer.norm, rank);
        expect(static_cast<long>(mixer.from_latent.size()) == heads, "heads have both their maps");
        for (long head = 0; head < heads; ++head) {
            expect_size(*mixer.to_latent[head], rank, nope, "kv_b_proj of keys");
            expect_size(*mixer.from_latent[head], mixer.v_head_dim, rank, "kv_b_proj of values");
        }
        expect_size(*mixer.output, size_, heads * mixer.v_head_dim, "o_proj");
        expect_rope(mixer.rope, rotary);
        expect(!pool().is_state && pool().num_heads == 1 && pool().dim == rank + rotary &&
                   pool().value_dim == rank,
               "its pool keeps its latents");
    }

    // A convolution's channels and width, and the state that its pool keeps of it.
    void expect_convolution(const Floats& taps, const Floats& bias, long channels,
                            long width) const {
        expect_floats(taps, width * channels, "a channel has taps");
        expect(bias.empty() || static_cast<long>(bias.size()) == channels, "a channel has a bias");
        expect(pool().is_state && !pool().part_sizes.empty(), "its pool keeps states");
        expect(pool().part_sizes[0] == (width - 1) * channels, "its pool keeps the last inputs");
    }

    void expect_state(long size) const {
        expect(pool().part_sizes.size() == 2 && pool().part_sizes[1] == size,
               "its pool keeps its state");
    }

    void check(const ShortConv& mixer) const {
        expect_size(*mixer.inputs, 3 * mixer.channels, size_, "in_proj");
        expect_size(*mixer.output, size_, mixer.channels, "out_proj");
        expect_convolution(mixer.taps, mixer.bias, mixer.channels, mixer.width);
    }

    void check(const GatedDelta& mixer) const {
        const long keys = mixer.num_key_heads * mixer.key_head_dim;
        const long heads = mixer.num_value_heads, values = heads * mixer.value_head_dim;
        expect(mixer.num_key_heads > 0 && heads % mixer.num_key_heads == 0, "heads are groups");
        const long channels = 2 * keys + values;
        expect_size(*mixer.inputs, channels + values + 2 * heads, size_, "in_proj");
        expect_size(*mixer.output, size_, values, "out_proj");
        expect_convolution(mixer.taps, {}, channels, mixer.width);
        expect_floats(mixer.step_bias, heads, "a head has a bias of its step");
        expect_floats(mixer.rates, heads, "a head has a rate");
        expect_norm(mixer.norm, mixer.value_head_dim);
        expect_state(heads * mixer.key_head_dim * mixer.value_head_dim);
    }

    void check(const Mamba2& mixer) const {
        const long heads = mixer.num_heads, inner = heads * mixer.head_dim;
        expect(mixer.n_groups > 0 && heads % mixer.n_groups == 0, "heads are groups");
        const long channels = inner + 2 * mixer.n_groups * mixer.state_size;
        expect_size(*mixer.inputs, inner + channels + heads, size_, "in_proj");
        expect_size(*mixer.output, size_, inner, "out_proj");
        expect_convolution(mixer.taps, mixer.conv_bias, channels, mixer.width);
        expect_floats(mixer.step_bias, heads, "a head has a bias of its step");
        expect_floats(mixer.rates, heads, "a head has a rate");
        expect_floats(mixer.skip, heads, "a head has a skip");
        expect_norm(mixer.norm, inner);
        expect_state(inner * mixer.state_size);
    }

    void check(const GatedMlp& mlp) const {
        const long inner = mlp.down->inputs;
        expect_size(*mlp.gate_up, 2 * inner, size_, "gate_up_proj");
        expect_size(*mlp.down, size_, inner, "down_proj");
    }

    void check(const Experts& moe) const {
        const long num_experts = static_cast<long>(moe.experts.size());
        expect_size(*moe.router, num_experts, size_, "the router");
        expect(0 < moe.num_experts_per_tok && moe.num_experts_per_tok <= num_experts,
               "no more experts are chosen than there are");
        expect(moe.n_group > 0 && num_experts % moe.n_group == 0, "groups of experts are alike");
        expect(moe.e_score_correction_bias.empty() ||
                   static_cast<long>(moe.e_score_correction_bias.size()) == num_experts,
               "an expert has a correction");
        check(moe.experts.front());
        if (moe.shared) check(*moe.shared);
    }

    const Decoder& decoder_;
    const Layer& layer_;
    const long size_;
};

}  // namespace

void check_layer(const Decoder& decoder, const Layer& layer) { Checks(decoder, layer).run(); }

}  // namespace session_server
