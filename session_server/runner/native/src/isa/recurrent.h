// Recurrences of one token: a state is read and written once.

#pragma once

#include <cmath>

#include "elementwise.h"

namespace session_server::SESSION_SERVER_ISA {

inline void convolve(const float* const* inputs, const float* const* taps, const float* bias,
                     long width, long n, float* y) {
    each(n, y, [](F a, F tap) { return a * tap; }, inputs[width - 1], taps[width - 1]);
    for (long back = 0; back < width - 1; ++back) {
        each(n, y, [](F sum, F a, F tap) { return fma(a, tap, sum); },
             static_cast<const float*>(y), inputs[back], taps[back]);
    }
    if (bias != nullptr) {
        each(n, y, [](F a, F b) { return a + b; }, static_cast<const float*>(y), bias);
    }
}

// Two passes over the state: what it holds for the key, then the correction and the answer.
inline void delta_rule(float* state, const float* q, const float* k, const float* v, float decay,
                       float write, long keys, long values, float* out, float* scratch) {
    const float kept = std::exp(decay);
    std::fill(scratch, scratch + values, 0.0f);
    for (long i = 0; i < keys; ++i) {
        const F key = broadcast(k[i] * kept);
        each(values, scratch, [key](F sum, F s) { return fma(key, s, sum); },
             static_cast<const float*>(scratch), state + i * values);
    }
    each(values, scratch, [write](F seen, F value) { return (value - seen) * write; },
         static_cast<const float*>(scratch), v);
    std::fill(out, out + values, 0.0f);
    for (long i = 0; i < keys; ++i) {
        float* row = state + i * values;
        const F key = broadcast(k[i]), query = broadcast(q[i]);
        each(values, row, [kept, key](F s, F error) { return fma(key, error, s * kept); },
             static_cast<const float*>(row), static_cast<const float*>(scratch));
        each(values, out, [query](F sum, F s) { return fma(query, s, sum); },
             static_cast<const float*>(out), static_cast<const float*>(row));
    }
}

inline void state_space(float* state, const float* x, float decay, const float* write,
                        const float* read, long dim, long size, float* out) {
    const float kept = std::exp(decay);
    for (long i = 0; i < dim; ++i) {
        float* row = state + i * size;
        const F value = broadcast(x[i]);
        each(size, row, [kept, value](F s, F w) { return fma(value, w, s * kept); },
             static_cast<const float*>(row), write);
        F acc{};
        long j = 0;
        for (; j + kLanes <= size; j += kLanes) acc = fma(load(row + j), load(read + j), acc);
        float total = sum(acc);
        for (; j < size; ++j) total += row[j] * read[j];
        out[i] = total;
    }
}

}  // namespace session_server::SESSION_SERVER_ISA
