// One vector of floats per instruction set, and the few operations kernels need of it.
//
// Arithmetic uses the compiler's vector extensions, so a kernel is written once. Only conversions,
// fused multiply-add and integer dot products name instructions.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace session_server::SESSION_SERVER_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
#else
constexpr int kLanes = 4;
constexpr int kRegisters = 16;
#endif

using F = float __attribute__((vector_size(4 * kLanes)));
using I = int32_t __attribute__((vector_size(4 * kLanes)));
using U = uint32_t __attribute__((vector_size(4 * kLanes)));
using H = uint16_t __attribute__((vector_size(2 * kLanes)));
using B = int8_t __attribute__((vector_size(kLanes)));

inline F load(const float* p) {
    F v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }

// `s - 0` is `s` for every s, so compilers turn this into one broadcast.
inline F broadcast(float s) { return s - F{}; }

inline F fma(F a, F b, F c) {
#if defined(__AVX512F__)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;  // contracted where the target has it
#endif
}

// Of a NaN in `a`, the result is `b`; a NaN in `b` stays.
inline F max(F a, F b) { return a > b ? a : b; }
inline F min(F a, F b) { return a < b ? a : b; }

template <int Step, int... Lane>
inline F pair_sums(F a, F b, std::integer_sequence<int, Lane...>) {
    // Lane i of a block of 2 * Step lanes: sums of neighbours Step apart, first of a, then of b.
    F low = __builtin_shufflevector(
        a, b, ((Lane % (2 * Step) < Step) ? Lane : kLanes + Lane - Step)...);
    F high = __builtin_shufflevector(
        a, b, ((Lane % (2 * Step) < Step) ? Lane + Step : kLanes + Lane)...);
    return low + high;
}

template <int Step>
inline void fold(F* v, int count) {
    for (int i = 0; i < count / 2; ++i) {
        v[i] = pair_sums<Step>(v[2 * i], v[2 * i + 1], std::make_integer_sequence<int, kLanes>());
    }
}

// Return a vector whose lane i is the sum of v[i]; overwrites v.
inline F sums(F (&v)[kLanes]) {
    fold<1>(v, kLanes);
    fold<2>(v, kLanes / 2);
    if constexpr (kLanes > 4) fold<4>(v, kLanes / 4);
    if constexpr (kLanes > 8) fold<8>(v, kLanes / 8);
    return v[0];
}

inline float sum(F v) {
    float lanes[kLanes];
    store(lanes, v);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
    }
    return lanes[0];
}

inline float largest(F v) {
    float lanes[kLanes];
    store(lanes, v);
    for (int width = kLanes / 2; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) {
            lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
        }
    }
    return lanes[0];
}

inline float to_float(uint16_t bf16) {
    uint32_t bits = static_cast<uint32_t>(bf16) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float half_to_float(uint16_t half) {
    _Float16 value;
    std::memcpy(&value, &half, sizeof half);
    return static_cast<float>(value);
}

inline uint16_t to_half(float value) {
    auto half = static_cast<_Float16>(value);
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}

inline F load_bf16(const uint16_t* p) {
    H v;
    std::memcpy(&v, p, sizeof v);
    return (F)(__builtin_convertvector(v, U) << 16);
}

inline F load_half(const uint16_t* p) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    float lanes[kLanes];
    for (int i = 0; i < kLanes; ++i) lanes[i] = half_to_float(p[i]);
    return load(lanes);
#endif
}

// e^x within 2 ulp; 0 below -104 (-87.3 without AVX-512), infinity above 88.7. Cody and Waite's reduction, then a
// polynomial of Cephes (Moshier 1989).
inline F exp(F x) {
#if defined(__AVX512F__)
    F bounded = max(broadcast(-150.0f), min(broadcast(150.0f), x));
    F n = (F)_mm512_roundscale_ps((__m512)(bounded * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT);
#else
    const F magic = broadcast(12582912.0f);  // adding it rounds to an integer in the low bits
    F bounded = max(broadcast(-88.0f), min(broadcast(88.8f), x));
    F shifted = fma(bounded, broadcast(1.44269504088896341f), magic);
    F n = shifted - magic;
#endif
    F r = fma(n, broadcast(-0.693359375f), bounded);
    r = fma(n, broadcast(2.12194440e-4f), r);
    F p = broadcast(1.9875691500e-4f);
    p = fma(p, r, broadcast(1.3981999507e-3f));
    p = fma(p, r, broadcast(8.3334519073e-3f));
    p = fma(p, r, broadcast(4.1665795894e-2f));
    p = fma(p, r, broadcast(1.6666665459e-1f));
    p = fma(p, r, broadcast(5.0000001201e-1f));
    p = fma(p, r * r, r + 1.0f);
#if defined(__AVX512F__)
    return (F)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    // Two factors: n = 128 is no exponent of a float, but 64 twice is.
    I whole = (I)shifted - (I)magic;
    I half = whole >> 1;
    F scaled = p * (F)((half + 127) << 23) * (F)((whole - half + 127) << 23);
    return x < -87.33f ? F{} : scaled;
#endif
}

inline F sigmoid(F x) { return 1.0f / (1.0f + exp(-x)); }

inline F tanh(F x) { return 1.0f - 2.0f / (1.0f + exp(2.0f * x)); }

}  // namespace session_server::SESSION_SERVER_ISA
