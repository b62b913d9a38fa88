// Numbers of 16 bits as floats, one at a time.
//
// For files that are compiled for every CPU. Kernels have their own, each in the namespace of its
// instruction set: of an inline function that several files share, the linker keeps any one copy.

#pragma once

#include <cstdint>
#include <cstring>

#include "packed.h"

namespace session_server {

inline float from_bf16(uint16_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
}

inline float from_half(uint16_t bits) {
    _Float16 half;
    std::memcpy(&half, &bits, sizeof half);
    return static_cast<float>(half);
}

inline uint16_t bf16_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t half_bits(float value) {
    const auto half = static_cast<_Float16>(value);
    uint16_t bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}

inline float element(const void* data, DType dtype, size_t index) {
    if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
    const uint16_t bits = static_cast<const uint16_t*>(data)[index];
    return dtype == DType::kBFloat16 ? from_bf16(bits) : from_half(bits);
}

}  // namespace session_server
