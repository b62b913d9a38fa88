// Norms, rotations, gates and conversions of one token.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../kernels.h"
#include "vec.h"

namespace session_server::SESSION_SERVER_ISA {

// Apply f to vectors of [n] elements; the rest goes through a padded copy. `in`: arrays read.
template <class Function, class... In>
inline void each(long n, float* out, Function f, const In*... in) {
    long i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, f(load(in + i)...));
    if (i == n) return;
    const auto padded = [n, i](const float* p) {
        float lanes[kLanes] = {};
        std::memcpy(lanes, p + i, (n - i) * sizeof(float));
        return load(lanes);
    };
    float lanes[kLanes];
    store(lanes, f(padded(in)...));
    std::memcpy(out + i, lanes, (n - i) * sizeof(float));
}

inline float sum_of_squares(const float* x, long n) {
    F first{}, second{};
    long i = 0;
    for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
        F a = load(x + i), b = load(x + i + kLanes);
        first = fma(a, a, first);
        second = fma(b, b, second);
    }
    float total = sum(first + second);
    for (; i < n; ++i) total += x[i] * x[i];
    return total;
}

inline void rms_norm(const float* x, const float* weight, float eps, long n, float* y) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, n) / static_cast<float>(n) + eps);
    each(n, y, [scale](F a, F w) { return a * scale * w; }, x, weight);
}

inline void rotate(float* x, const float* phases, long n) {
    const float* sines = phases + n;
    for (long i = 0; i < n; i += 2) {
        const float a = x[i], b = x[i + 1];
        x[i] = a * phases[i] + b * sines[i];
        x[i + 1] = b * phases[i + 1] + a * sines[i + 1];
    }
}

inline void gate(const float* gates, const float* up, long n, const GateRule& rule, float* out) {
    switch (rule.kind) {
        case Gate::kSilu:
            return each(n, out, [](F g, F u) { return g * sigmoid(g) * u; }, gates, up);
        case Gate::kGeluTanh:
            return each(n, out, [](F g, F u) {
                F inner = 0.7978845608028654f * fma(g * g * g, broadcast(0.044715f), g);
                return 0.5f * g * (1.0f + tanh(inner)) * u;
            }, gates, up);
        case Gate::kClamped:
            return each(n, out, [&rule](F g, F u) {
                const F limit = broadcast(rule.limit);
                F bounded = min(limit, g);
                F clamped = max(-limit, min(limit, u));
                return bounded * sigmoid(bounded * rule.alpha) * (clamped + 1.0f);
            }, gates, up);
    }
}

inline void sigmoid_times(const float* gates, long n, float* x) {
    each(n, x, [](F g, F a) { return a * sigmoid(g); }, gates, static_cast<const float*>(x));
}

inline void silu(float* x, long n) {
    each(n, x, [](F a) { return a * sigmoid(a); }, static_cast<const float*>(x));
}

inline void store_kv(const float* x, long n, DType dtype, void* at) {
    if (dtype == DType::kFloat32) {
        std::memcpy(at, x, n * sizeof(float));
        return;
    }
    auto* out = static_cast<uint16_t*>(at);
    if (dtype == DType::kBFloat16) {
        for (long i = 0; i < n; ++i) out[i] = to_bf16(x[i]);
    } else {
        for (long i = 0; i < n; ++i) out[i] = to_half(x[i]);
    }
}

inline long argmax(const float* x, long n, bool* is_finite) {
    F most = broadcast(-INFINITY), zeros{};
    long i = 0;
    for (; i + kLanes <= n; i += kLanes) {
        F a = load(x + i);
        most = max(a, most);
        zeros += a * 0.0f;  // NaN as soon as one of them is no number
    }
    float best = largest(most), zero = sum(zeros);
    for (; i < n; ++i) {
        best = std::max(best, x[i]);
        zero += x[i] * 0.0f;
    }
    *is_finite = zero == 0.0f;
    const float* at = std::find(x, x + n, best);
    return at == x + n ? 0 : at - x;
}

}  // namespace session_server::SESSION_SERVER_ISA
