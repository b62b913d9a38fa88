// What a step works in: activations of all its tokens, and inputs of linears.

#pragma once

#include <algorithm>
#include <vector>

#include "model.h"

namespace session_server {

// Tokens, at most, whose inputs stay in a core's cache while panels pass by.
constexpr long kTokenBlock = 96;
// Elements that one item of elementwise work covers: blocks of quantization are whole in it.
constexpr long kSegment = 512;

// Tokens in as few blocks as hold them, all of about one size: weights are read once for each.
struct TokenBlocks {
    explicit TokenBlocks(long tokens)
        : num_tokens(tokens), count((tokens + kTokenBlock - 1) / kTokenBlock) {}

    long first(long block) const { return block * num_tokens / count; }
    long size(long block) const { return first(block + 1) - first(block); }

    long num_tokens;
    long count;
};

template <class T>
class Grown {
  public:
    T* get(size_t count) {
        if (count * sizeof(T) > buffer_.size()) buffer_ = Buffer(count * sizeof(T));
        return buffer_.template as<T>();
    }

    size_t num_bytes() const { return buffer_.size(); }

  private:
    Buffer buffer_;
};

// Inputs of linears in every form that one of them wants.
class Converted {
  public:
    void reserve(long num_tokens, long size) {
        stride_ = round_up(size, kSegment);
        const size_t elements = static_cast<size_t>(num_tokens) * stride_;
        floats_.get(elements);
        bf16_.get(elements);
        codes_.get(elements / 4 * kMaxQuadBytes);
        scales_.get(elements / kBlock);
        sums_.get(elements / kBlock);
    }

    Inputs as(InputForm form) {
        return {.form = form,
                .floats = floats_.get(0),
                .bf16 = bf16_.get(0),
                .codes = codes_.get(0),
                .scales = scales_.get(0),
                .sums = sums_.get(0),
                .stride = stride_,
                .quad_bytes = kernels().quad_bytes};
    }

    float* floats(long token) { return floats_.get(0) + token * stride_; }

    size_t num_bytes() const {
        return floats_.num_bytes() + bf16_.num_bytes() + codes_.num_bytes() + scales_.num_bytes() +
               sums_.num_bytes();
    }

  private:
    long stride_ = 0;
    Grown<float> floats_;
    Grown<uint16_t> bf16_;
    Grown<int8_t> codes_;
    Grown<float> scales_;
    Grown<int32_t> sums_;
};

// Inputs from element `first` of a token on.
inline Inputs segment(const Inputs& inputs, long token, long first) {
    Inputs at = inputs.from(token);
    at.floats += first;
    at.bf16 += first;
    at.codes += first / 4 * inputs.quad_bytes;
    at.scales += first / kBlock;
    at.sums += first / kBlock;
    return at;
}

// Floats per token that the parts of a step need, and inputs of linears.
struct Needs {
    long y = 0, z = 0, mixed = 0, routed = 0, inputs = 0, rows_per_token = 1, choices = 0;
    long scratch = 0;
    size_t num_bytes = 0;  // of feed-forwards, about what a step reads

    void cover(const Packed& weights) { inputs = std::max(inputs, weights.inputs); }

    void add(const GroupedQuery& mixer) {
        y = std::max(y, mixer.qkv->outputs);
        mixed = std::max(mixed, mixer.num_heads * mixer.head_dim);
        cover(*mixer.qkv), cover(*mixer.output);
        scratch = std::max(scratch, attention_scratch(mixer.head_dim, mixer.head_dim,
                                                      mixer.num_heads / mixer.num_kv_heads));
    }
    void add(const Latent& mixer) {
        const long row = mixer.kv_lora_rank + mixer.qk_rope_head_dim;
        y = std::max(y, mixer.down->outputs);
        if (mixer.query) {
            z = std::max(z, mixer.query->second->outputs);
            cover(*mixer.query->second);
        }
        mixed = std::max(mixed, mixer.num_heads * std::max(row, mixer.v_head_dim));
        routed = std::max(routed, mixer.num_heads * mixer.kv_lora_rank);
        cover(*mixer.down), cover(*mixer.output);
        const long widest = std::max(mixer.kv_lora_rank, mixer.qk_nope_head_dim);
        scratch = std::max({scratch, attention_scratch(row, mixer.kv_lora_rank, mixer.num_heads),
                            kTokenBlock * (widest + kBlock) * 3});
    }
    void add(const ShortConv& mixer) {
        y = std::max(y, 3 * mixer.channels);
        z = std::max(z, mixer.channels);
        mixed = std::max(mixed, mixer.channels);
        cover(*mixer.inputs), cover(*mixer.output);
    }
    void add(const GatedDelta& mixer) {
        const long values = mixer.num_value_heads * mixer.value_head_dim;
        y = std::max(y, mixer.inputs->outputs);
        z = std::max(z, values);
        mixed = std::max(mixed, 2 * mixer.num_key_heads * mixer.key_head_dim + values);
        cover(*mixer.inputs), cover(*mixer.output);
        scratch = std::max(scratch, mixer.value_head_dim);
    }
    void add(const Mamba2& mixer) {
        const long inner = mixer.num_heads * mixer.head_dim;
        y = std::max(y, mixer.inputs->outputs);
        z = std::max(z, inner);
        mixed = std::max(mixed, inner + 2 * mixer.n_groups * mixer.state_size);
        cover(*mixer.inputs), cover(*mixer.output);
        scratch = std::max(scratch, mixer.head_dim);
    }
    void add(const GatedMlp& mlp) {
        y = std::max(y, mlp.gate_up->outputs);
        cover(*mlp.gate_up), cover(*mlp.down);
    }
    void add(const Experts& moe, long hidden) {
        const GatedMlp& any = moe.experts.front();
        long shared = 0;
        if (moe.shared) {
            add(*moe.shared);
            shared = moe.shared->gate_up->outputs;
            mixed = std::max(mixed, moe.shared->down->inputs);
        }
        add(any);
        y = std::max(y, shared + moe.num_experts_per_tok * std::max(any.gate_up->outputs, hidden));
        routed = std::max(routed, moe.router->outputs);
        choices = std::max(choices, moe.num_experts_per_tok);
        rows_per_token = std::max(rows_per_token, 1 + moe.num_experts_per_tok);
    }
};

inline Needs needs_of(const Decoder& model) {
    Needs needs;
    needs.inputs = needs.z = model.hidden_size;
    for (const Layer& layer : model.layers) {
        std::visit([&](const auto& mixer) { needs.add(mixer); }, layer.mixer);
        if (const auto* mlp = std::get_if<GatedMlp>(&layer.ffn)) {
            needs.add(*mlp);
            needs.num_bytes += mlp->gate_up->num_bytes() + mlp->down->num_bytes();
        } else {
            needs.add(std::get<Experts>(layer.ffn), model.hidden_size);
            needs.num_bytes += size_t{1} << 22;
        }
    }
    return needs;
}

struct Decoder::Memory {
    explicit Memory(const Decoder& model) : needs(needs_of(model)), size(model.hidden_size) {
        for (const Rope& rope : model.ropes) pairs += static_cast<long>(rope.frequencies.size());
    }

    // Make room for steps of so many tokens; it only grows.
    void reserve(long num_tokens, int num_threads) {
        hidden.get(num_tokens * size);
        y.get(num_tokens * needs.y);
        z.get(num_tokens * needs.z);
        mixed.get(num_tokens * needs.mixed);
        routed.get(num_tokens * needs.routed);
        phases.get(num_tokens * 4 * pairs);
        x.reserve(num_tokens * needs.rows_per_token, needs.inputs);
        scratch.resize(num_threads);
        for (auto& of_thread : scratch) of_thread.get(needs.scratch + 64);
        order.resize(num_tokens * needs.choices);
        slots_of_expert.resize(num_tokens * needs.choices);
        weights.resize(num_tokens * needs.choices);
    }

    size_t num_bytes() const {
        size_t sum = x.num_bytes() + (order.capacity() + slots_of_expert.capacity()) * sizeof(long) +
                     weights.capacity() * sizeof(float);
        for (const auto* floats : {&hidden, &y, &z, &mixed, &phases, &routed}) {
            sum += floats->num_bytes();
        }
        for (const auto& of_thread : scratch) sum += of_thread.num_bytes();
        return sum;
    }

    const Needs needs;
    const long size;
    long pairs = 0;  // of all rotary embeddings
    Grown<float> hidden, y, z, mixed, phases, routed;
    Converted x;
    std::vector<Grown<float>> scratch;  // of each thread
    std::vector<long> slots_of_expert, order, first_of_expert;
    std::vector<float> weights;
};

}  // namespace session_server
