// Grouped-query and latent attention, in place over paged KV.

#include <algorithm>
#include <cstring>

#include "step.h"

namespace session_server {

namespace {

long tiles(const Span& span, long tokens) { return (span.num_tokens + tokens - 1) / tokens; }

}  // namespace

void Step::attend(const Layer& layer, const AttentionRule& rule, const float* queries, long stride,
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

void Step::mix(const Layer& layer, const GroupedQuery& mixer) {
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

void Step::mix(const Layer& layer, const Latent& mixer) {
    prepare(layer.before_mixer, {mixer.down.get()});
    linear(*mixer.down, y_);
    const long rank = mixer.kv_lora_rank, rotary = mixer.qk_rope_head_dim, row = rank + rotary;
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
    const long heads = mixer.num_heads, of_head = mixer.qk_nope_head_dim + rotary;
    float* absorbed = mixed_;  // [tokens][heads][row]
    by_head(mixer.to_latent, num_tokens_, q, stride, of_head, absorbed, heads * row, row);
    me_.share(num_tokens_ * heads, [&](long item) {
        const long t = item / heads, head = item % heads;
        float* to = absorbed + (t * heads + head) * row + rank;
        const float* from = q + t * stride + head * of_head + mixer.qk_nope_head_dim;
        std::memcpy(to, from, rotary * sizeof(float));
        kernels_.rotate(to, phases(mixer.rope, t), rotary);
    });
    float* latents = memory_.routed.get(0);  // [tokens][heads][rank]
    attend(layer, mixer.rule, absorbed, heads * row, heads, nullptr, latents);
    const long size = heads * mixer.v_head_dim;
    by_head(mixer.from_latent, num_tokens_, latents, heads * rank, rank, mixed_, size,
            mixer.v_head_dim);
    convert(*mixer.output, num_tokens_, size, [&](long t, long first, long, float*) {
        return mixed_ + t * size + first;
    });
    add_linear(*mixer.output, layer.after_mixer);
}

void Step::by_head(const std::vector<Linear>& linears, long num_tokens, const float* x, long ldx,
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

}  // namespace session_server
