#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "scalars.h"

namespace session_server {

namespace {

// Tokens, at most, whose inputs stay in a core's cache while panels pass by.
constexpr long kTokenBlock = 96;
// Of the weights that a waiting member begins to read.
constexpr size_t kFetchedBytes = size_t{64} << 10;
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
        const long row = mixer.rank + mixer.rotary;
        y = std::max(y, mixer.down->outputs);
        if (mixer.query) {
            z = std::max(z, mixer.query->second->outputs);
            cover(*mixer.query->second);
        }
        mixed = std::max(mixed, mixer.num_heads * std::max(row, mixer.value));
        routed = std::max(routed, mixer.num_heads * mixer.rank);
        cover(*mixer.down), cover(*mixer.output);
        const long of_head = kTokenBlock * (std::max(mixer.rank, mixer.nope) + kBlock) * 3;
        scratch = std::max({scratch, attention_scratch(row, mixer.rank, mixer.num_heads), of_head});
    }
    void add(const ShortConv& mixer) {
        y = std::max(y, 3 * mixer.channels);
        z = std::max(z, mixer.channels);
        mixed = std::max(mixed, mixer.channels);
        cover(*mixer.inputs), cover(*mixer.output);
    }
    void add(const GatedDelta& mixer) {
        const long values = mixer.value_heads * mixer.value_dim;
        y = std::max(y, mixer.inputs->outputs);
        z = std::max(z, values);
        mixed = std::max(mixed, 2 * mixer.key_heads * mixer.key_dim + values);
        cover(*mixer.inputs), cover(*mixer.output);
        scratch = std::max(scratch, mixer.value_dim);
    }
    void add(const Mamba2& mixer) {
        const long inner = mixer.num_heads * mixer.head_dim;
        y = std::max(y, mixer.inputs->outputs);
        z = std::max(z, inner);
        mixed = std::max(mixed, inner + 2 * mixer.groups * mixer.state_size);
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
        y = std::max(y, shared + moe.num_chosen * std::max(any.gate_up->outputs, hidden));
        routed = std::max(routed, moe.router->outputs);
        choices = std::max(choices, moe.num_chosen);
        rows_per_token = std::max(rows_per_token, 1 + moe.num_chosen);
    }
};

Needs needs_of(const Decoder& model) {
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

}  // namespace

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
        for (const auto* floats : {&hidden, &y, &z, &mixed, &phases, &routed}) sum += floats->num_bytes();
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

namespace {

Inputs segment(const Inputs& inputs, long token, long first) {
    Inputs at = inputs.from(token);
    at.floats += first;
    at.bf16 += first;
    at.codes += first / 4 * inputs.quad_bytes;
    at.scales += first / kBlock;
    at.sums += first / kBlock;
    return at;
}

// Up to `tile` panels of a linear from `first` on; members take tiles in turns.
Panels tile_of(const Member& me, const Packed& weights, long first, long tile) {
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

    void run(float* out) {
        embed();
        for (const Layer& layer : model_.layers) {
            std::visit([&](const auto& mixer) { mix(layer, mixer); }, layer.mixer);
            std::visit([&](const auto& ffn) { feed(layer, ffn); }, layer.ffn);
        }
        me_.share(in_.num_wanted, [&](long i) {
            kernels_.rms_norm(hidden_ + in_.wanted[i] * size_, model_.norm.weight.data(),
                              model_.norm.eps, size_, out + i * size_);
        });
    }

  private:
    // ---- parts that layers share ----

    void embed() {
        me_.share(num_tokens_, [&](long t) {
            const long id = in_.token_ids[t];
            float* row = hidden_ + t * size_;
            for (long i = 0; i < size_; ++i) {
                row[i] = element(model_.embedding, model_.embedding_dtype, id * size_ + i) *
                         model_.embedding_scale;
            }
            float* phases = memory_.phases.get(0);
            for (const Rope& rope : model_.ropes) {
                const long pairs = static_cast<long>(rope.frequencies.size());
                float* of_token = phases + t * 4 * pairs;
                const auto position = static_cast<float>(in_.positions[t]);
                for (long i = 0; i < pairs; ++i) {
                    const float angle = position * rope.frequencies[i];
                    const float cosine = std::cos(angle) * rope.factor;
                    const float sine = std::sin(angle) * rope.factor;
                    of_token[2 * i] = of_token[2 * i + 1] = cosine;
                    of_token[2 * pairs + 2 * i] = -sine;
                    of_token[2 * pairs + 2 * i + 1] = sine;
                }
                phases += num_tokens_ * 4 * pairs;
            }
        });
    }

    const float* phases(long rope, long token) const {
        const float* at = memory_.phases.get(0);
        for (long i = 0; i < rope; ++i) {
            at += num_tokens_ * 4 * static_cast<long>(model_.ropes[i].frequencies.size());
        }
        return at + token * 4 * static_cast<long>(model_.ropes[rope].frequencies.size());
    }

    InputForm form_of(const Packed& weights) const { return kernels_.input_form(weights.format); }

    // Norm the hidden states for `weights`; without a norm, take them as they are.
    void prepare(const std::optional<Norm>& norm, std::initializer_list<const Packed*> weights) {
        me_.share(num_tokens_, [&](long t) {
            const float* row = hidden_ + t * size_;
            float* normed = memory_.x.floats(t);
            if (norm) {
                kernels_.rms_norm(row, norm->weight.data(), norm->eps, size_, normed);
            } else {
                std::memcpy(normed, row, size_ * sizeof(float));
            }
            for (const Packed* of : weights) {
                kernels_.convert(normed, size_, memory_.x.as(form_of(*of)), t);
            }
        }, [&] { fetch(**weights.begin()); });
    }

    // Begin to read what a linear reads first: a member that waits leaves the memory no rest.
    void fetch(const Packed& weights) {
        if (num_tokens_ == 0) return;
        constexpr size_t kLine = 64;
        const size_t tile = weights.panel_bytes() * kernels_.tile_panels(weights.format, num_tokens_);
        const size_t size = weights.weights.size(), first = std::min(size, me_.index() * tile);
        const size_t count = std::min({tile, kFetchedBytes, size - first});
        const uint8_t* at = weights.weights.as<uint8_t>() + first;
        for (size_t line = 0; line < count; line += kLine) __builtin_prefetch(at + line, 0, 2);
    }

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
                Write write) {
        if (num_tokens == 0) return;
        const TokenBlocks blocks(num_tokens);
        const long tile = kernels_.tile_panels(weights.format, num_tokens);
        const long chunks = (weights.panels() + tile - 1) / tile;
        me_.share(blocks.count * chunks, [&](long item) {
            const long block = item / chunks, token = blocks.first(block);
            kernels_.linear(weights, tile_of(me_, weights, item % chunks * tile, tile),
                            inputs.from(token), blocks.size(block), y + token * ldy, ldy, write);
        });
    }

    void linear(const Packed& weights, float* y) {
        linear(weights, memory_.x.as(form_of(weights)), num_tokens_, y, weights.outputs, {});
    }

    // Add a mixer's or ffn's last linear to the hidden states.
    void add_linear(const Packed& weights, const After& after) {
        const Inputs inputs = memory_.x.as(form_of(weights));
        if (!after.norm) {
            linear(weights, inputs, num_tokens_, hidden_, size_, {true, after.factor});
            return;
        }
        linear(weights, inputs, num_tokens_, z_, size_, {});
        add_normed(after);
    }

    void add_normed(const After& after) {
        me_.share(num_tokens_, [&](long t) {
            float* row = z_ + t * size_;
            float* to = hidden_ + t * size_;
            kernels_.rms_norm(row, after.norm->weight.data(), after.norm->eps, size_, row);
            for (long i = 0; i < size_; ++i) to[i] += row[i];
        });
    }

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

    // Attend with all rows. `queries` [tokens][heads][dim] lie `stride` apart from token to token.
    void attend(const Layer& layer, const AttentionRule& rule, const float* queries, long stride,
                long num_heads, const float* sinks, float* out) {
        const Pool& pool = pool_of(layer);
        const long group = num_heads / pool.num_heads;
        const long heads_at_once = std::min(group, kernels_.lane_queries);
        const long parts = (group + heads_at_once - 1) / heads_at_once;
        const long tokens_at_once = std::max(1l, kernels_.lane_queries / heads_at_once);
        // Spans are sorted by their tokens: those of one tile come first.
        const auto rest = std::partition_point(
            in_.spans.begin(), in_.spans.end(),
            [&](const Span& span) { return span.num_tokens <= tokens_at_once; });
        const long num_short = rest - in_.spans.begin();
        long items = num_short;
        for (auto span = rest; span != in_.spans.end(); ++span) items += tiles(*span, tokens_at_once);
        const long of_tile = pool.num_heads * parts;
        me_.share(items * of_tile, [&](long item) {
            // The last tiles of a row have the most keys; long rows come last.
            long tile = items - 1 - item / of_tile;
            auto span = tile < num_short ? in_.spans.begin() + tile : rest;
            if (tile < num_short) {
                tile = 0;
            } else {
                tile -= num_short;
                for (; tile >= tiles(*span, tokens_at_once); ++span) {
                    tile -= tiles(*span, tokens_at_once);
                }
            }
            const long head = item % of_tile / parts, part = item % of_tile % parts;
            const long first_head = head * group + part * heads_at_once;
            const long heads = std::min(heads_at_once, group - part * heads_at_once);
            const long first = tile * tokens_at_once;
            const long width = pool.dtype == DType::kFloat32 ? 4 : 2;
            const char* keys = static_cast<const char*>(pool.base) +
                               (layer.in_pool * pool.layer_stride + head * pool.head_stride) * width;
            const KvRows kv = {.keys = keys,
                               .values = keys + pool.value_offset * width,
                               .dtype = pool.dtype,
                               .pages = pages_of(pool, *span),
                               .page_size = pool.page_size,
                               .page_stride = pool.page_size * pool.dim,
                               .stride = pool.dim,
                               .key_dim = pool.dim,
                               .value_dim = pool.value_dim};
            const long token = span->offset + first;
            kernels_.attend(kv, rule,
                            {.queries = queries + token * stride + first_head * pool.dim,
                             .out = out + (token * num_heads + first_head) * pool.value_dim,
                             .query_stride = stride,
                             .out_stride = num_heads * pool.value_dim,
                             .position = span->start + first,
                             .num_tokens = std::min(tokens_at_once, span->num_tokens - first),
                             .is_alone = span->num_tokens == 1,
                             .group = heads,
                             .sinks = sinks == nullptr ? nullptr : sinks + first_head},
                            scratch_);
        });
    }

    static long tiles(const Span& span, long tokens) {
        return (span.num_tokens + tokens - 1) / tokens;
    }

    // ---- attention ----

    void mix(const Layer& layer, const GroupedQuery& mixer) {
        prepare(layer.before_mixer, {mixer.qkv.get()});
        linear(*mixer.qkv, y_);
        const long dim = mixer.head_dim, heads = mixer.num_heads, kv_heads = mixer.num_kv_heads;
        const long width = mixer.qkv->outputs, rotated = heads + kv_heads;
        if (mixer.projection_norm) {
            me_.share(num_tokens_, [&](long t) {
                float* q = y_ + t * width;
                float* k = q + heads * dim;
                const auto& [of_q, of_k] = *mixer.projection_norm;
                kernels_.rms_norm(q, of_q.weight.data(), of_q.eps, heads * dim, q);
                kernels_.rms_norm(k, of_k.weight.data(), of_k.eps, kv_heads * dim, k);
            });
        }
        const Pool& pool = pool_of(layer);
        const long stored = rotated + kv_heads;
        me_.share(num_tokens_ * stored, [&](long item) {
            const long t = item / stored, head = item % stored;
            float* x = y_ + t * width + head * dim;
            if (head < rotated) {
                if (mixer.head_norm) {
                    const Norm& norm = *mixer.head_norm;
                    kernels_.rms_norm(x, norm.weight.data() + head * dim, norm.eps, dim, x);
                }
                if (mixer.rope >= 0) kernels_.rotate(x, phases(mixer.rope, t), mixer.rotary_dim);
            }
            if (head < heads) return;
            const long side = head < rotated ? 0 : pool.value_offset;
            const long kv_head = (head - heads) % kv_heads;
            kernels_.store_kv(x, dim, pool.dtype,
                              slot(layer, t, kv_head * pool.head_stride + side));
        });
        const float* sinks = mixer.sinks.empty() ? nullptr : mixer.sinks.data();
        attend(layer, mixer.rule, y_, width, heads, sinks, mixed_);
        const long size = heads * dim;
        convert(*mixer.output, num_tokens_, size, [&](long t, long first, long count, float*) {
            float* values = mixed_ + t * size + first;
            if (mixer.is_gated) {
                kernels_.sigmoid_times(y_ + t * width + stored * dim + first, count, values);
            }
            return values;
        });
        add_linear(*mixer.output, layer.after_mixer);
    }

    void mix(const Layer& layer, const Latent& mixer) {
        prepare(layer.before_mixer, {mixer.down.get()});
        linear(*mixer.down, y_);
        const long rank = mixer.rank, rotary = mixer.rotary, row = rank + rotary;
        const long width = mixer.down->outputs, split = width - row;
        const Pool& pool = pool_of(layer);
        me_.share(num_tokens_, [&](long t) {
            float* x = y_ + t * width + split;
            kernels_.rms_norm(x, mixer.norm.weight.data(), mixer.norm.eps, rank, x);
            kernels_.rotate(x + rank, phases(mixer.rope, t), rotary);
            kernels_.store_kv(x, row, pool.dtype, slot(layer, t, 0));
            if (!mixer.query) return;
            const Norm& norm = mixer.query->first;
            float* latent = memory_.x.floats(t);
            kernels_.rms_norm(y_ + t * width, norm.weight.data(), norm.eps, split, latent);
            kernels_.convert(latent, split, memory_.x.as(form_of(*mixer.query->second)), t);
        });
        float* q = y_;
        long stride = width;
        if (mixer.query) {
            q = z_;
            stride = mixer.query->second->outputs;
            linear(*mixer.query->second, q);
        }
        const long heads = mixer.num_heads, of_head = mixer.nope + rotary;
        float* absorbed = mixed_;  // [tokens][heads][row]
        by_head(mixer.to_latent, num_tokens_, q, stride, of_head, absorbed, heads * row, row);
        me_.share(num_tokens_ * heads, [&](long item) {
            const long t = item / heads, head = item % heads;
            float* to = absorbed + (t * heads + head) * row + rank;
            std::memcpy(to, q + t * stride + head * of_head + mixer.nope, rotary * sizeof(float));
            kernels_.rotate(to, phases(mixer.rope, t), rotary);
        });
        float* latents = memory_.routed.get(0);  // [tokens][heads][rank]
        attend(layer, mixer.rule, absorbed, heads * row, heads, nullptr, latents);
        const long size = heads * mixer.value;
        by_head(mixer.from_latent, num_tokens_, latents, heads * rank, rank, mixed_, size,
                mixer.value);
        convert(*mixer.output, num_tokens_, size, [&](long t, long first, long, float*) {
            return mixed_ + t * size + first;
        });
        add_linear(*mixer.output, layer.after_mixer);
    }

    // Apply a linear of its own to each head: x[token * ldx + head * head_size] to
    // y[token * ldy + head * out_size].
    void by_head(const std::vector<Linear>& linears, long num_tokens, const float* x, long ldx,
                 long head_size, float* y, long ldy, long out_size) {
        const long heads = static_cast<long>(linears.size());
        const TokenBlocks blocks(num_tokens);
        me_.share(heads * blocks.count, [&](long item) {
            const long head = item % heads, first = blocks.first(item / heads);
            const long count = blocks.size(item / heads);
            const Packed& weights = *linears[head];
            Inputs inputs = {.form = form_of(weights),
                             .stride = round_up(weights.inputs, kBlock),
                             .quad_bytes = kernels_.quad_bytes};
            const long elements = kTokenBlock * inputs.stride;
            float* memory = scratch_.floats;
            inputs.floats = memory;
            inputs.bf16 = reinterpret_cast<uint16_t*>(memory);
            inputs.codes = reinterpret_cast<int8_t*>(memory);
            inputs.scales = memory + elements / 4 * kMaxQuadBytes / 4;
            inputs.sums = reinterpret_cast<int32_t*>(memory + elements);
            for (long t = 0; t < count; ++t) {
                kernels_.convert(x + (first + t) * ldx + head * head_size, weights.inputs, inputs, t);
            }
            kernels_.linear(weights, {0, weights.panels(), weights.panels()}, inputs, count,
                            y + first * ldy + head * out_size, ldy, {});
        });
    }

    // ---- recurrences ----

    // Convolve x[tokens][stride], n channels, of all rows into mixed_ [tokens][n], and keep the
    // last inputs of every target.
    void convolve(const Layer& layer, const float* x, long stride, long n, long width,
                  const Floats& taps, const Floats& bias) {
        const Pool& pool = pool_of(layer);
        const long past = width - 1, page = pool.part_sizes[0];
        float* states = pool.parts[0] + layer.in_pool * pool.num_pages * page;
        const long segments = round_up(n, kSegment) / kSegment;
        const long rows = static_cast<long>(in_.spans.size());
        static const float kZeros[kSegment] = {};
        me_.share(rows * segments, [&](long item) {
            const Span& span = in_.spans[item / segments];
            const long first = item % segments * kSegment, count = std::min(kSegment, n - first);
            // Input `index` of the row, counted from its first new token; negative ones are kept.
            const auto input = [&](long index) -> const float* {
                if (index >= 0) return x + (span.offset + index) * stride + first;
                if (span.source == 0) return kZeros;
                return states + span.source * page + (past + index) * n + first;
            };
            const float* inputs[kMaxConvWidth];
            const float* of_taps[kMaxConvWidth];
            for (long i = 0; i < width; ++i) of_taps[i] = taps.data() + i * n + first;
            for (long t = 0; t < span.num_tokens; ++t) {
                for (long i = 0; i < width; ++i) inputs[i] = input(t - past + i);
                kernels_.convolve(inputs, of_taps, bias.empty() ? nullptr : bias.data() + first,
                                  width, count, mixed_ + (span.offset + t) * n + first);
            }
            for (const auto& [length, target] : span.targets) {
                for (long i = 0; i < past; ++i) {
                    std::memcpy(states + target * page + i * n + first,
                                input(length - span.start - past + i), count * sizeof(float));
                }
            }
        });
    }

    // Call f(state, token) for every token of every row and head, in order, with the state
    // [size] of the head, and keep it where targets say.
    template <class Function>
    void recur(const Layer& layer, long heads, long size, Function f) {
        const Pool& pool = pool_of(layer);
        const long page = pool.part_sizes[1];
        float* states = pool.parts[1] + layer.in_pool * pool.num_pages * page;
        const long rows = static_cast<long>(in_.spans.size());
        me_.share(rows * heads, [&](long item) {
            const Span& span = in_.spans[item / heads];
            const long head = item % heads;
            const auto state_in = [&](long of_page) { return states + of_page * page + head * size; };
            float* state = state_in(span.targets.back().second);
            if (span.source == 0) {
                std::fill(state, state + size, 0.0f);
            } else {
                std::memcpy(state, state_in(span.source), size * sizeof(float));
            }
            auto target = span.targets.begin();
            for (long t = 0; t < span.num_tokens; ++t) {
                f(state, span.offset + t, head);
                if (target->first == span.start + t + 1) {
                    float* kept = state_in(target->second);
                    if (kept != state) std::memcpy(kept, state, size * sizeof(float));
                    ++target;
                }
            }
        });
    }

    void mix(const Layer& layer, const ShortConv& mixer) {
        prepare(layer.before_mixer, {mixer.inputs.get()});
        linear(*mixer.inputs, y_);
        const long n = mixer.channels;
        me_.share(num_tokens_, [&](long t) {
            const float* x = y_ + t * 3 * n;
            float* gated = z_ + t * n;
            for (long i = 0; i < n; ++i) gated[i] = x[i] * x[2 * n + i];
        });
        convolve(layer, z_, n, n, mixer.width, mixer.taps, mixer.bias);
        convert(*mixer.output, num_tokens_, n, [&](long t, long first, long count, float* at) {
            const float* after = y_ + t * 3 * n + n + first;
            const float* values = mixed_ + t * n + first;
            for (long i = 0; i < count; ++i) at[i] = values[i] * after[i];
            return at;
        });
        add_linear(*mixer.output, layer.after_mixer);
    }

    void mix(const Layer& layer, const GatedDelta& mixer) {
        prepare(layer.before_mixer, {mixer.inputs.get()});
        linear(*mixer.inputs, y_);
        const long keys = mixer.key_heads * mixer.key_dim, values = mixer.value_heads * mixer.value_dim;
        const long n = 2 * keys + values, width = mixer.inputs->outputs, heads = mixer.value_heads;
        convolve(layer, y_, width, n, mixer.width, mixer.taps, {});
        const float query_scale = 1.0f / std::sqrt(static_cast<float>(mixer.key_dim));
        me_.share(num_tokens_, [&](long t) {
            float* x = mixed_ + t * n;
            kernels_.silu(x, n);
            for (long head = 0; head < 2 * mixer.key_heads; ++head) {
                float* of_head = x + head * mixer.key_dim;
                float squares = 0.0f;
                for (long i = 0; i < mixer.key_dim; ++i) squares += of_head[i] * of_head[i];
                float scale = 1.0f / std::sqrt(squares + 1e-6f);
                if (head < mixer.key_heads) scale *= query_scale;
                for (long i = 0; i < mixer.key_dim; ++i) of_head[i] *= scale;
            }
        });
        const long per_key = heads / mixer.key_heads;
        recur(layer, heads, mixer.key_dim * mixer.value_dim, [&](float* state, long t, long head) {
            const float* x = mixed_ + t * n;
            const float* of_token = y_ + t * width + n;
            const float write = 1.0f / (1.0f + std::exp(-of_token[values + head]));
            const float step = of_token[values + heads + head] + mixer.step_bias[head];
            const float* q = x + head / per_key * mixer.key_dim;
            kernels_.delta_rule(state, q, q + keys, x + 2 * keys + head * mixer.value_dim,
                                softplus(step) * mixer.rates[head], write, mixer.key_dim,
                                mixer.value_dim, z_ + t * values + head * mixer.value_dim,
                                scratch_.floats);
        });
        me_.share(num_tokens_ * heads, [&](long item) {
            const long t = item / heads, head = item % heads;
            float* x = z_ + t * values + head * mixer.value_dim;
            float* gate = y_ + t * width + n + head * mixer.value_dim;
            kernels_.rms_norm(x, mixer.norm.weight.data(), mixer.norm.eps, mixer.value_dim, x);
            kernels_.silu(gate, mixer.value_dim);
            for (long i = 0; i < mixer.value_dim; ++i) x[i] *= gate[i];
        });
        convert(*mixer.output, num_tokens_, values, [&](long t, long first, long, float*) {
            return z_ + t * values + first;
        });
        add_linear(*mixer.output, layer.after_mixer);
    }

    void mix(const Layer& layer, const Mamba2& mixer) {
        prepare(layer.before_mixer, {mixer.inputs.get()});
        linear(*mixer.inputs, y_);
        const long heads = mixer.num_heads, dim = mixer.head_dim, inner = heads * dim;
        const long written = mixer.groups * mixer.state_size, n = inner + 2 * written;
        const long width = mixer.inputs->outputs;
        convolve(layer, y_ + inner, width, n, mixer.width, mixer.taps, mixer.conv_bias);
        me_.share(num_tokens_, [&](long t) { kernels_.silu(mixed_ + t * n, n); });
        const long per_group = heads / mixer.groups;
        recur(layer, heads, dim * mixer.state_size, [&](float* state, long t, long head) {
            const float* x = mixed_ + t * n;
            const float step = y_[t * width + inner + n + head] + mixer.step_bias[head];
            const float length = std::clamp(softplus(step), mixer.least_step, mixer.most_step);
            const float* write = x + inner + head / per_group * mixer.state_size;
            float* out = z_ + t * inner + head * dim;
            float* scaled = scratch_.floats;
            for (long i = 0; i < dim; ++i) scaled[i] = x[head * dim + i] * length;
            kernels_.state_space(state, scaled, length * mixer.rates[head], write, write + written,
                                 dim, mixer.state_size, out);
            for (long i = 0; i < dim; ++i) out[i] += x[head * dim + i] * mixer.skip[head];
        });
        const long of_group = inner / mixer.groups;
        me_.share(num_tokens_ * mixer.groups, [&](long item) {
            const long t = item / mixer.groups, first = item % mixer.groups * of_group;
            float* x = z_ + t * inner + first;
            float* gate = y_ + t * width + first;
            kernels_.silu(gate, of_group);
            for (long i = 0; i < of_group; ++i) x[i] *= gate[i];
            kernels_.rms_norm(x, mixer.norm.weight.data() + first, mixer.norm.eps, of_group, x);
        });
        convert(*mixer.output, num_tokens_, inner, [&](long t, long first, long, float*) {
            return z_ + t * inner + first;
        });
        add_linear(*mixer.output, layer.after_mixer);
    }

    static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

    // ---- feed-forwards ----

    void feed(const Layer& layer, const GatedMlp& mlp) {
        prepare(layer.before_ffn, {mlp.gate_up.get()});
        linear(*mlp.gate_up, y_);
        convert_gated(mlp, num_tokens_);
        add_linear(*mlp.down, layer.after_ffn);
    }

    void convert_gated(const GatedMlp& mlp, long num_tokens) {
        const long inner = mlp.down->inputs;
        convert(*mlp.down, num_tokens, inner, [&](long t, long first, long count, float* at) {
            const float* gate = y_ + t * 2 * inner + first;
            kernels_.gate(gate, gate + inner, count, mlp.rule, at);
            return at;
        });
    }

    // Chosen experts are computed one choice after the other, sorted by expert, and added up per
    // token from the lowest expert on, so a sum does not depend on the other tokens.
    void feed(const Layer& layer, const Experts& moe) {
        const GatedMlp& any = moe.experts.front();
        const long chosen = moe.num_chosen, choices = num_tokens_ * chosen;
        const Packed* shared = moe.shared ? moe.shared->gate_up.get() : moe.router.get();
        prepare(layer.before_ffn, {moe.router.get(), any.gate_up.get(), shared});
        float* logits = memory_.routed.get(0);
        linear(*moe.router, logits);
        me_.share(num_tokens_, [&](long t) { choose(moe, logits + t * moe.router->outputs, t); });
        float* total = z_;
        if (moe.shared) {
            linear(*moe.shared->gate_up, y_);
            // The normed inputs are still needed: gate into y_ itself.
            const long inner = moe.shared->down->inputs;
            me_.share(num_tokens_, [&](long t) {
                float* gate = y_ + t * 2 * inner;
                kernels_.gate(gate, gate + inner, inner, moe.shared->rule, mixed_ + t * inner);
            });
        }
        me_.share(1, [&](long) { sort_choices(moe); });
        // Gather the inputs of every choice behind those of the tokens.
        const Inputs inputs = memory_.x.as(form_of(*any.gate_up));
        me_.share(choices, [&](long slot) {
            const long t = memory_.order[slot] / chosen;
            kernels_.convert(memory_.x.floats(t), size_, inputs, num_tokens_ + slot);
        });
        const long inner = any.down->inputs;
        float* gates = moe.shared ? y_ + num_tokens_ * 2 * moe.shared->down->inputs : y_;
        by_expert(moe, &GatedMlp::gate_up, inputs.from(num_tokens_), gates, 2 * inner);
        if (moe.shared) {
            const long size = moe.shared->down->inputs;
            convert(*moe.shared->down, num_tokens_, size, [&](long t, long first, long, float*) {
                return mixed_ + t * size + first;
            });
            linear(*moe.shared->down, total);
        }
        const Inputs activated = memory_.x.as(form_of(*any.down));
        me_.share(choices, [&](long slot) {
            const float* gate = gates + slot * 2 * inner;
            float* at = memory_.x.floats(slot);
            kernels_.gate(gate, gate + inner, inner, any.rule, at);
            kernels_.convert(at, inner, activated, slot);
        });
        float* outputs = gates;
        by_expert(moe, &GatedMlp::down, activated, outputs, size_);
        me_.share(num_tokens_, [&](long t) {
            float* sum = total + t * size_;
            if (!moe.shared) std::fill(sum, sum + size_, 0.0f);
            for (long i = 0; i < chosen; ++i) {
                const float weight = memory_.weights[t * chosen + i];
                const float* of_choice = outputs + memory_.slots_of_expert[t * chosen + i] * size_;
                for (long j = 0; j < size_; ++j) sum[j] += weight * of_choice[j];
            }
            if (layer.after_ffn.norm) return;
            float* to = hidden_ + t * size_;
            for (long j = 0; j < size_; ++j) to[j] += layer.after_ffn.factor * sum[j];
        });
        if (layer.after_ffn.norm) add_normed(layer.after_ffn);
    }

    void by_expert(const Experts& moe, Linear GatedMlp::*which, const Inputs& inputs, float* y,
                   long ldy) {
        const Packed& any = *(moe.experts.front().*which);
        const long num_experts = static_cast<long>(moe.experts.size());
        const long tile = kernels_.tile_panels(any.format, 1);
        const long chunks = (any.panels() + tile - 1) / tile;
        me_.share(num_experts * chunks, [&](long item) {
            const long expert = item / chunks, first = item % chunks * tile;
            const long begin = memory_.first_of_expert[expert];
            const long count = memory_.first_of_expert[expert + 1] - begin;
            if (count == 0) return;
            const Packed& weights = *(moe.experts[expert].*which);
            kernels_.linear(weights, tile_of(me_, weights, first, tile), inputs.from(begin), count,
                            y + begin * ldy, ldy, {});
        });
    }

    // Choose the experts of a token: ids ascending in `order`, weights beside them.
    void choose(const Experts& moe, const float* logits, long t) {
        const long num = moe.router->outputs, chosen = moe.num_chosen;
        std::vector<float> scores(logits, logits + num);
        if (moe.is_sigmoid) {
            for (float& score : scores) score = 1.0f / (1.0f + std::exp(-score));
        } else {
            const float most = *std::max_element(scores.begin(), scores.end());
            float total = 0.0f;
            for (float& score : scores) total += score = std::exp(score - most);
            for (float& score : scores) score /= total;
        }
        std::vector<float> ranks = scores;
        for (size_t i = 0; i < moe.correction.size(); ++i) ranks[i] += moe.correction[i];
        if (moe.num_chosen_groups < moe.num_groups) leave_groups(moe, ranks);
        std::vector<long> ids(num);
        std::iota(ids.begin(), ids.end(), 0);
        const auto before = [&](long a, long b) {
            return ranks[a] > ranks[b] || (ranks[a] == ranks[b] && a < b);
        };
        std::partial_sort(ids.begin(), ids.begin() + chosen, ids.end(), before);
        std::sort(ids.begin(), ids.begin() + chosen);
        float total = 0.0f;
        for (long i = 0; i < chosen; ++i) total += scores[ids[i]];
        for (long i = 0; i < chosen; ++i) {
            float weight = scores[ids[i]];
            if (moe.norm_topk_prob) weight /= total;
            memory_.weights[t * chosen + i] = weight * moe.scaling;
            memory_.slots_of_expert[t * chosen + i] = ids[i];
        }
    }

    static void leave_groups(const Experts& moe, std::vector<float>& ranks) {
        const long size = static_cast<long>(ranks.size()) / moe.num_groups;
        const long counted = moe.is_sigmoid ? std::min(2l, size) : 1;
        std::vector<std::pair<float, long>> groups;
        for (long group = 0; group < moe.num_groups; ++group) {
            std::vector<float> own(ranks.begin() + group * size, ranks.begin() + (group + 1) * size);
            std::partial_sort(own.begin(), own.begin() + counted, own.end(), std::greater<>());
            groups.emplace_back(std::accumulate(own.begin(), own.begin() + counted, 0.0f), -group);
        }
        std::sort(groups.begin(), groups.end(), std::greater<>());
        for (long i = moe.num_chosen_groups; i < moe.num_groups; ++i) {
            const long group = -groups[i].second;
            std::fill(ranks.begin() + group * size, ranks.begin() + (group + 1) * size, -INFINITY);
        }
    }

    // Order choices by expert; `slots_of_expert` then holds the place of every choice.
    void sort_choices(const Experts& moe) {
        const long num_experts = static_cast<long>(moe.experts.size());
        const long choices = num_tokens_ * moe.num_chosen;
        auto& first = memory_.first_of_expert;
        first.assign(num_experts + 1, 0);
        for (long i = 0; i < choices; ++i) ++first[memory_.slots_of_expert[i] + 1];
        std::partial_sum(first.begin(), first.end(), first.begin());
        std::vector<long> next(first.begin(), first.end() - 1);
        for (long i = 0; i < choices; ++i) {
            const long slot = next[memory_.slots_of_expert[i]]++;
            memory_.order[slot] = i;
            memory_.slots_of_expert[i] = slot;
        }
    }

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

}  // namespace

Decoder::Memory& Decoder::working_memory() {
    if (!memory_) memory_ = std::make_shared<Memory>(*this);
    return *memory_;
}

size_t Decoder::reserve(const Team& team, long num_tokens) {
    working_memory().reserve(num_tokens, team.size());
    return working_memory().num_bytes();
}

void Decoder::forward(Team& team, const StepInputs& step, float* hidden) {
    for (long t = 0; t < step.num_tokens; ++t) {
        if (step.token_ids[t] < 0 || step.token_ids[t] >= vocab_size) {
            throw std::out_of_range("a token id lies outside of the vocabulary");
        }
    }
    Memory& memory = working_memory();
    memory.reserve(step.num_tokens, team.size());
    team.run(is_worth_sharing(memory.needs.num_bytes * std::max(1l, step.num_tokens / 4)),
             [&](Member& me) { Step(*this, memory, step, me).run(hidden); });
}

bool is_worth_sharing(size_t num_bytes) { return num_bytes >= (size_t{1} << 20); }

void apply_linear(Team& team, const Packed& weights, const float* x, long num_tokens, float* y) {
    if (num_tokens == 0) return;
    static thread_local Converted converted;
    converted.reserve(num_tokens, weights.inputs);
    const Kernels& table = kernels();
    const Inputs inputs = converted.as(table.input_form(weights.format));
    for (long t = 0; t < num_tokens; ++t) table.convert(x + t * weights.inputs, weights.inputs, inputs, t);
    const long tile = table.tile_panels(weights.format, num_tokens);
    const long chunks = (weights.panels() + tile - 1) / tile;
    team.run(is_worth_sharing(weights.num_bytes()), [&](Member& me) {
        me.share(chunks, [&](long chunk) {
            const long first = chunk * tile;
            table.linear(weights, tile_of(me, weights, first, tile), inputs, num_tokens, y,
                         weights.outputs, {});
        });
    });
}

}  // namespace session_server
