// Weights in the layout that kernels read.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace session_server {

constexpr long kPanel = 16;  // outputs that lie side by side, on every instruction set
constexpr long kBlock = 32;  // inputs that share a scale

enum class Format { kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

// How a kernel wants its inputs.
enum class InputForm { kFloat32, kBFloat16, kInt8 };

constexpr long round_up(long n, long unit) { return (n + unit - 1) / unit * unit; }

// Memory of its own mapping, on huge pages where the system has them; throws std::bad_alloc.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(size_t num_bytes);
    ~Buffer();
    Buffer(Buffer&& other) noexcept : data_(other.data_), size_(other.size_) {
        other.data_ = nullptr;
        other.size_ = 0;
    }
    Buffer& operator=(Buffer&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    size_t size() const { return size_; }

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

// A matrix [outputs, inputs] cut into panels of kPanel outputs, panel after panel.
//
// In a panel, inputs follow each other and the outputs of one input lie side by side, so a kernel
// multiplies a vector of weights with one broadcast input and needs no sum over lanes. The last
// panel is padded with zeros, and so are inputs.
//
//   kFloat32, kFloat16   [inputs][kPanel]
//   kBFloat16            [inputs / 2][kPanel][2]
//   kInt8                [inputs / 4][kPanel][4], codes plus 128
//   kInt4                [inputs / 8][kPanel][4], of input i + 4 in the high half of byte i
//
// A quantized weight is scale * code - minimum, where `scales` and `minimums` are half floats
// [panels][inputs / kBlock][kPanel]; without minimums codes are signed around 128, or 8.
struct Packed {
    Format format = Format::kFloat32;
    long outputs = 0;
    long inputs = 0;         // as given
    long padded_inputs = 0;  // as stored
    Buffer weights;
    Buffer scales;
    Buffer minimums;
    Buffer bias;  // float32 [panels][kPanel], or empty

    long panels() const { return round_up(outputs, kPanel) / kPanel; }
    size_t panel_bytes() const;
    size_t num_bytes() const {
        return weights.size() + scales.size() + minimums.size() + bias.size();
    }
};

// Rows as read: element i of a row is `at(data, i)` in the given dtype.
enum class DType { kFloat32, kBFloat16, kFloat16 };

// Pack [outputs, inputs], rows `stride` elements apart. Quantizes to the nearest code if `format`
// is kInt8 (symmetric, the largest magnitude of a block becomes 127) or kInt4 (from the smallest
// to the largest of a block).
Packed pack(const void* rows, DType dtype, long outputs, long inputs, long stride, Format format);

// Pack codes [outputs, inputs] with float32 scales and minimums [outputs, inputs / kBlock];
// `minimums` may be null. `num_bits`: 8 (signed codes) or 4 (0 to 15, minimums required).
Packed pack_codes(const void* codes, int num_bits, const float* scales, const float* minimums,
                  long outputs, long inputs);

void set_bias(Packed& packed, const float* bias);

}  // namespace session_server
