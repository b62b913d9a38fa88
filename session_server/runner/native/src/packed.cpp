#include "packed.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <vector>

#include "scalars.h"

namespace session_server {

namespace {

size_t position(Format format, long input, long lane) {
    switch (format) {
        case Format::kBFloat16: return (input / 2 * kPanel + lane) * 2 + input % 2;
        case Format::kInt8: return (input / 4 * kPanel + lane) * 4 + input % 4;
        case Format::kInt4: return (input / 8 * kPanel + lane) * 4 + input % 4;
        default: return input * kPanel + lane;
    }
}

void put_code(Packed& packed, uint8_t* panel, long input, long lane, int code) {
    uint8_t& byte = panel[position(packed.format, input, lane)];
    if (packed.format == Format::kInt8) {
        byte = static_cast<uint8_t>(code);
    } else {
        byte |= static_cast<uint8_t>(code << (input % 8 < 4 ? 0 : 4));
    }
}

// Quantize one block of a row: `codes` as stored. Returns scale and minimum as they will be read.
struct Affine {
    uint16_t scale;
    uint16_t minimum;
};

Affine quantize_block(const float* values, bool is_int8, int* codes) {
    const bool is_finite =
        std::all_of(values, values + kBlock, [](float value) { return std::isfinite(value); });
    if (!is_finite) {
        // No code says so; a scale does, and so do all sums with it.
        std::fill(codes, codes + kBlock, is_int8 ? 128 : 8);
        return {half_bits(std::numeric_limits<float>::quiet_NaN()), 0};
    }
    if (is_int8) {
        float most = 0.0f;
        for (long i = 0; i < kBlock; ++i) most = std::max(most, std::fabs(values[i]));
        uint16_t bits = half_bits(most / 127.0f);
        float scale = from_half(bits);
        for (long i = 0; i < kBlock; ++i) {
            float code = scale > 0.0f ? std::nearbyint(values[i] / scale) : 0.0f;
            codes[i] = static_cast<int>(std::clamp(code, -127.0f, 127.0f)) + 128;
        }
        return {bits, 0};
    }
    float least = 0.0f, most = 0.0f;
    for (long i = 0; i < kBlock; ++i) {
        least = std::min(least, values[i]);
        most = std::max(most, values[i]);
    }
    uint16_t scale_bits = half_bits((most - least) / 15.0f), minimum_bits = half_bits(-least);
    float scale = from_half(scale_bits), minimum = from_half(minimum_bits);
    for (long i = 0; i < kBlock; ++i) {
        float code = scale > 0.0f ? std::nearbyint((values[i] + minimum) / scale) : 0.0f;
        codes[i] = static_cast<int>(std::clamp(code, 0.0f, 15.0f));
    }
    return {scale_bits, minimum_bits};
}

Packed empty(Format format, long outputs, long inputs) {
    Packed packed;
    packed.format = format;
    packed.outputs = outputs;
    packed.inputs = inputs;
    bool is_quantized = format == Format::kInt8 || format == Format::kInt4;
    packed.padded_inputs = round_up(inputs, is_quantized ? kBlock : 2);
    packed.weights = Buffer(packed.panels() * packed.panel_bytes());
    if (is_quantized) {
        size_t size = packed.panels() * packed.padded_inputs / kBlock * kPanel * sizeof(uint16_t);
        packed.scales = Buffer(size);
        if (format == Format::kInt4) packed.minimums = Buffer(size);
    }
    return packed;
}

}  // namespace

Buffer::Buffer(size_t num_bytes) : size_(num_bytes) {
    if (num_bytes == 0) return;
#if defined(__SANITIZE_ADDRESS__)
    // The sanitizer knows the end of what it allocates, not of a mapping.
    data_ = std::aligned_alloc(64, (num_bytes + 63) / 64 * 64);
    if (data_ == nullptr) throw std::bad_alloc();
    std::memset(data_, 0, num_bytes);
    return;
#endif
    void* memory = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        size_ = 0;
        throw std::bad_alloc();
    }
#if defined(MADV_HUGEPAGE)
    constexpr size_t kHuge = size_t{2} << 20;
    // A wish; refusal changes nothing.
    if (num_bytes >= kHuge) madvise(memory, num_bytes, MADV_HUGEPAGE);
#endif
    data_ = memory;
}

Buffer::~Buffer() {
#if defined(__SANITIZE_ADDRESS__)
    std::free(data_);
#else
    if (data_ != nullptr) munmap(data_, size_);
#endif
}

size_t Packed::panel_bytes() const {
    size_t elements = static_cast<size_t>(padded_inputs) * kPanel;
    switch (format) {
        case Format::kFloat32: return elements * 4;
        case Format::kInt8: return elements;
        case Format::kInt4: return elements / 2;
        default: return elements * 2;
    }
}

Packed pack(const void* rows, DType dtype, long outputs, long inputs, long stride, Format format) {
    Packed packed = empty(format, outputs, inputs);
    bool is_int8 = format == Format::kInt8, is_quantized = is_int8 || format == Format::kInt4;
    long blocks = packed.padded_inputs / kBlock;
    std::vector<float> row(packed.padded_inputs, 0.0f);
    for (long output = 0; output < outputs; ++output) {
        for (long i = 0; i < inputs; ++i) row[i] = element(rows, dtype, output * stride + i);
        long panel = output / kPanel, lane = output % kPanel;
        uint8_t* data = packed.weights.as<uint8_t>() + panel * packed.panel_bytes();
        if (is_quantized) {
            for (long block = 0; block < blocks; ++block) {
                int codes[kBlock];
                Affine affine = quantize_block(&row[block * kBlock], is_int8, codes);
                size_t at = (panel * blocks + block) * kPanel + lane;
                packed.scales.as<uint16_t>()[at] = affine.scale;
                if (!is_int8) packed.minimums.as<uint16_t>()[at] = affine.minimum;
                for (long i = 0; i < kBlock; ++i) {
                    put_code(packed, data, block * kBlock + i, lane, codes[i]);
                }
            }
            continue;
        }
        for (long i = 0; i < inputs; ++i) {
            size_t at = position(format, i, lane);
            switch (format) {
                case Format::kFloat32: reinterpret_cast<float*>(data)[at] = row[i]; break;
                case Format::kBFloat16: reinterpret_cast<uint16_t*>(data)[at] = bf16_bits(row[i]); break;
                default: reinterpret_cast<uint16_t*>(data)[at] = half_bits(row[i]);
            }
        }
    }
    return packed;
}

Packed pack_codes(const void* codes, int num_bits, const float* scales, const float* minimums,
                  long outputs, long inputs) {
    if (inputs % kBlock != 0) throw std::invalid_argument("inputs are whole blocks of 32");
    if (num_bits == 4 && minimums == nullptr) throw std::invalid_argument("4 bits need minimums");
    if (num_bits == 8 && minimums != nullptr) throw std::invalid_argument("8 bits are symmetric");
    Packed packed = empty(num_bits == 8 ? Format::kInt8 : Format::kInt4, outputs, inputs);
    long blocks = inputs / kBlock;
    for (long output = 0; output < outputs; ++output) {
        long panel = output / kPanel, lane = output % kPanel;
        uint8_t* data = packed.weights.as<uint8_t>() + panel * packed.panel_bytes();
        for (long block = 0; block < blocks; ++block) {
            size_t from = output * blocks + block, at = (panel * blocks + block) * kPanel + lane;
            packed.scales.as<uint16_t>()[at] = half_bits(scales[from]);
            if (minimums != nullptr) packed.minimums.as<uint16_t>()[at] = half_bits(minimums[from]);
        }
        for (long i = 0; i < inputs; ++i) {
            size_t from = output * inputs + i;
            int code = num_bits == 8 ? static_cast<const int8_t*>(codes)[from] + 128
                                     : static_cast<const uint8_t*>(codes)[from] & 15;
            put_code(packed, data, i, lane, code);
        }
    }
    return packed;
}

void set_bias(Packed& packed, const float* bias) {
    packed.bias = Buffer(packed.panels() * kPanel * sizeof(float));
    std::memcpy(packed.bias.as<float>(), bias, packed.outputs * sizeof(float));
}

}  // namespace session_server
