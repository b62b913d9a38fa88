// Short convolutions, the gated delta rule and Mamba 2: token by token through a state.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "step.h"

namespace session_server {

namespace {

float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace

void Step::convolve(const Layer& layer, const float* x, long stride, long n, long width,
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

template <class Function>
void Step::recur(const Layer& layer, long heads, long size, Function f) {
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

void Step::mix(const Layer& layer, const ShortConv& mixer) {
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

void Step::mix(const Layer& layer, const GatedDelta& mixer) {
    prepare(layer.before_mixer, {mixer.inputs.get()});
    linear(*mixer.inputs, y_);
    const long keys = mixer.num_key_heads * mixer.key_head_dim;
    const long values = mixer.num_value_heads * mixer.value_head_dim;
    const long n = 2 * keys + values, width = mixer.inputs->outputs, heads = mixer.num_value_heads;
    convolve(layer, y_, width, n, mixer.width, mixer.taps, {});
    const float query_scale = 1.0f / std::sqrt(static_cast<float>(mixer.key_head_dim));
    me_.share(num_tokens_, [&](long t) {
        float* x = mixed_ + t * n;
        kernels_.silu(x, n);
        for (long head = 0; head < 2 * mixer.num_key_heads; ++head) {
            float* of_head = x + head * mixer.key_head_dim;
            float squares = 0.0f;
            for (long i = 0; i < mixer.key_head_dim; ++i) squares += of_head[i] * of_head[i];
            float scale = 1.0f / std::sqrt(squares + 1e-6f);
            if (head < mixer.num_key_heads) scale *= query_scale;
            for (long i = 0; i < mixer.key_head_dim; ++i) of_head[i] *= scale;
        }
    });
    const long per_key = heads / mixer.num_key_heads;
    const long of_head = mixer.key_head_dim * mixer.value_head_dim;
    recur(layer, heads, of_head, [&](float* state, long t, long head) {
        const float* x = mixed_ + t * n;
        const float* of_token = y_ + t * width + n;
        const float write = 1.0f / (1.0f + std::exp(-of_token[values + head]));
        const float step = of_token[values + heads + head] + mixer.step_bias[head];
        const float* q = x + head / per_key * mixer.key_head_dim;
        kernels_.delta_rule(state, q, q + keys, x + 2 * keys + head * mixer.value_head_dim,
                            softplus(step) * mixer.rates[head], write, mixer.key_head_dim,
                            mixer.value_head_dim, z_ + t * values + head * mixer.value_head_dim,
                            scratch_.floats);
    });
    me_.share(num_tokens_ * heads, [&](long item) {
        const long t = item / heads, head = item % heads;
        float* x = z_ + t * values + head * mixer.value_head_dim;
        float* gate = y_ + t * width + n + head * mixer.value_head_dim;
        kernels_.rms_norm(x, mixer.norm.weight.data(), mixer.norm.eps, mixer.value_head_dim, x);
        kernels_.silu(gate, mixer.value_head_dim);
        for (long i = 0; i < mixer.value_head_dim; ++i) x[i] *= gate[i];
    });
    convert(*mixer.output, num_tokens_, values, [&](long t, long first, long, float*) {
        return z_ + t * values + first;
    });
    add_linear(*mixer.output, layer.after_mixer);
}

void Step::mix(const Layer& layer, const Mamba2& mixer) {
    prepare(layer.before_mixer, {mixer.inputs.get()});
    linear(*mixer.inputs, y_);
    const long heads = mixer.num_heads, dim = mixer.head_dim, inner = heads * dim;
    const long written = mixer.n_groups * mixer.state_size, n = inner + 2 * written;
    const long width = mixer.inputs->outputs;
    convolve(layer, y_ + inner, width, n, mixer.width, mixer.taps, mixer.conv_bias);
    me_.share(num_tokens_, [&](long t) { kernels_.silu(mixed_ + t * n, n); });
    const long per_group = heads / mixer.n_groups;
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
    const long of_group = inner / mixer.n_groups;
    me_.share(num_tokens_ * mixer.n_groups, [&](long item) {
        const long t = item / mixer.n_groups, first = item % mixer.n_groups * of_group;
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

}  // namespace session_server
