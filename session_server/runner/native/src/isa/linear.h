// Linears for the few tokens of a step, and for the many of a prompt.
//
// A tile is R panels by C tokens. Its sums stay in registers while the weights stream by once; the
// number of tokens never changes the order of a sum. Sums are cut every kChunk inputs, which keeps
// rounding errors of long rows small.

#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "../kernels.h"
#include "vec.h"

namespace session_server::SESSION_SERVER_ISA {

constexpr int kVectors = kPanel / kLanes;  // of one panel
constexpr long kChunk = 512;

#if defined(__AVX512BF16__)
constexpr bool kHasBf16Dot = true;
#else
constexpr bool kHasBf16Dot = false;
#endif

constexpr bool is_quantized(Format format) {
    return format == Format::kInt8 || format == Format::kInt4;
}

// Tokens of a tile: sums of codes take two registers each, and panels share more broadcasts.
constexpr int max_tokens(Format format) {
    if (kLanes == 4) return 2;
    return is_quantized(format) ? 4 : kLanes == 8 ? 6 : 8;
}

// Panels of a tile of `tokens`: as many as leave registers for weights and inputs.
constexpr int tile_panels(Format format, int tokens) {
    int free = is_quantized(format) ? kRegisters / 2 - 4 : kRegisters * 3 / 4;
    int panels = free / (tokens * kVectors);
    return panels < 1 ? 1 : panels > 8 ? 8 : panels;
}

inline F bias_of(const Packed& weights, long panel, int vector) {
    if (weights.bias.size() == 0) return F{};
    return load(weights.bias.as<float>() + panel * kPanel + vector * kLanes);
}

inline void write_out(const Packed& weights, long panel, const F (&sum)[kVectors], float* y,
                      Write write) {
    long left = std::min(kPanel, weights.outputs - panel * kPanel);
    float lanes[kPanel];
    for (int v = 0; v < kVectors; ++v) {
        F out = sum[v] + bias_of(weights, panel, v);
        if (left == kPanel) {
            float* at = y + v * kLanes;
            store(at, write.adds ? fma(broadcast(write.factor), out, load(at)) : out);
        } else {
            store(lanes + v * kLanes, out);
        }
    }
    if (left == kPanel) return;
    for (long i = 0; i < left; ++i) {
        y[i] = write.adds ? std::fma(write.factor, lanes[i], y[i]) : lanes[i];
    }
}

// Cache lines that are fetched while a tile computes: a few for every kBlock inputs, so that they
// trickle in and reading does not wait for them.
struct Ahead {
    const uint8_t* line = nullptr;
    long lines_per_block = 0;
    long lines_left = 0;

    Ahead() = default;
    Ahead(const Packed& weights, long first, long count, long num_passes) {
        count = std::min(count, weights.panels() - first);
        if (count <= 0) return;
        line = weights.weights.as<uint8_t>() + first * weights.panel_bytes();
        lines_left = count * static_cast<long>(weights.panel_bytes()) / kLine;
        const long blocks = num_passes * ((weights.padded_inputs + kBlock - 1) / kBlock);
        lines_per_block = (lines_left + blocks - 1) / blocks;
    }

    inline void fetch() {
        for (long i = std::min(lines_per_block, lines_left); i > 0; --i, --lines_left) {
            __builtin_prefetch(line, 0, 2);
            line += kLine;
        }
    }

    static constexpr long kLine = 64;
};

// Weights of 32 or 16 bits: one vector of weights times one broadcast input.
template <Format kFormat, int R, int C>
struct FloatTile {
    static constexpr bool kDot = kFormat == Format::kBFloat16 && kHasBf16Dot;
    static constexpr int kStep = kFormat == Format::kBFloat16 ? 2 : 1;
    static constexpr int kElement = kFormat == Format::kFloat32 ? 4 : 2;

    const uint8_t* panels[R];
    const float* x[C];
    const uint16_t* pairs[C];
    F sum[R][C][kVectors];

    inline void add(long begin, long end, Ahead& ahead) {
        F acc[R][C][kVectors] = {};
        for (long k = begin; k < end; k += kStep) {
            if (k % kBlock == 0) ahead.fetch();
            F low[R][kVectors], high[R][kVectors];
            for (int r = 0; r < R; ++r) {
                for (int v = 0; v < kVectors; ++v) read(r, v, k, low[r][v], high[r][v]);
            }
            for (int c = 0; c < C; ++c) {
                if constexpr (kDot) {
#if defined(__AVX512BF16__)
                    int pair;
                    std::memcpy(&pair, pairs[c] + k, sizeof pair);
                    __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
                    for (int r = 0; r < R; ++r) {
                        acc[r][c][0] = (F)_mm512_dpbf16_ps((__m512)acc[r][c][0],
                                                           (__m512bh)low[r][0], both);
                    }
#endif
                } else {
                    F first = broadcast(x[c][k]);
                    for (int r = 0; r < R; ++r) {
                        for (int v = 0; v < kVectors; ++v) {
                            acc[r][c][v] = fma(low[r][v], first, acc[r][c][v]);
                        }
                    }
                    if constexpr (kStep == 2) {
                        F second = broadcast(x[c][k + 1]);
                        for (int r = 0; r < R; ++r) {
                            for (int v = 0; v < kVectors; ++v) {
                                acc[r][c][v] = fma(high[r][v], second, acc[r][c][v]);
                            }
                        }
                    }
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int c = 0; c < C; ++c) {
                for (int v = 0; v < kVectors; ++v) sum[r][c][v] += acc[r][c][v];
            }
        }
    }

    inline void read(int r, int v, long k, F& low, F& high) const {
        const uint8_t* at = panels[r] + (k * kPanel + v * kLanes * kStep) * kElement;
        if constexpr (kFormat == Format::kFloat32) {
            low = load(reinterpret_cast<const float*>(at));
        } else if constexpr (kFormat == Format::kFloat16) {
            low = load_half(reinterpret_cast<const uint16_t*>(at));
        } else {
            U both;
            std::memcpy(&both, at, sizeof both);
            if constexpr (kDot) {
                low = (F)both;
            } else {
                low = (F)(both << 16);
                high = (F)(both & 0xffff0000u);
            }
        }
    }

    static void run(const Packed& weights, long panel, const Inputs& inputs, float* y, long ldy,
                    Write write, Ahead& ahead) {
        FloatTile tile;
        for (int r = 0; r < R; ++r) {
            tile.panels[r] = weights.weights.as<uint8_t>() + (panel + r) * weights.panel_bytes();
        }
        for (int c = 0; c < C; ++c) {
            if constexpr (kDot) {
                tile.pairs[c] = inputs.bf16 + c * inputs.stride;
            } else {
                tile.x[c] = inputs.floats + c * inputs.stride;
            }
        }
        std::memset(tile.sum, 0, sizeof tile.sum);
        for (long k = 0; k < weights.padded_inputs; k += kChunk) {
            tile.add(k, std::min(k + kChunk, weights.padded_inputs), ahead);
        }
        for (int c = 0; c < C; ++c) {
            for (int r = 0; r < R; ++r) {
                write_out(weights, panel + r, tile.sum[r][c], y + c * ldy + (panel + r) * kPanel,
                          write);
            }
        }
    }
};

// Four products of codes per lane: unsigned weights times signed inputs.
#if defined(__AVX512VNNI__)
constexpr int kQuadBytes = 4;  // bytes of input that one step of a dot product takes
inline I dot_quads(I acc, I weights, const int8_t* quad) {
    int bytes;
    std::memcpy(&bytes, quad, sizeof bytes);
    return (I)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)weights, _mm512_set1_epi32(bytes));
}
#else
// Inputs are kept as 16-bit pairs, (0, 2) and (1, 3): products of 8-bit codes, summed in pairs,
// would overflow the 16 bits of `maddubs`.
constexpr int kQuadBytes = 8;
inline I dot_pairs(I weights, int pair) {
#if defined(__AVX512BW__)
    return (I)_mm512_madd_epi16((__m512i)weights, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
    return (I)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(pair));
#else
    int low = static_cast<int16_t>(pair), high = pair >> 16;
    return (weights & 0xffff) * low + (I)((U)weights >> 16) * high;
#endif
}
inline I dot_quads(I acc, I weights, const int8_t* quad) {
    int even, odd;
    std::memcpy(&even, quad, sizeof even);
    std::memcpy(&odd, quad + 4, sizeof odd);
    I evens = weights & 0x00ff00ff, odds = (I)((U)weights >> 8) & 0x00ff00ff;
    return acc + dot_pairs(evens, even) + dot_pairs(odds, odd);
}
#endif

template <Format kFormat, int R, int C>
struct CodeTile {
    static constexpr bool kIsInt8 = kFormat == Format::kInt8;
    // Codes of 8 bits are symmetric around 128; those of 4 bits have a minimum in each block.
    static constexpr bool kHasMinimums = !kIsInt8;

    static void run(const Packed& weights, long panel, const Inputs& inputs, float* y, long ldy,
                    Write write, Ahead& ahead) {
        const long blocks = weights.padded_inputs / kBlock;
        const long input_blocks = inputs.stride / kBlock;
        const uint8_t* codes[R];
        const uint16_t* scales[R];
        const uint16_t* minimums[R];
        for (int r = 0; r < R; ++r) {
            codes[r] = weights.weights.as<uint8_t>() + (panel + r) * weights.panel_bytes();
            scales[r] = weights.scales.as<uint16_t>() + (panel + r) * blocks * kPanel;
            minimums[r] = weights.minimums.as<uint16_t>() + (panel + r) * blocks * kPanel;
        }
        F sum[R][C][kVectors] = {};
        for (long block = 0; block < blocks; ++block) {
            ahead.fetch();
            I dots[R][C][kVectors];
            for (int c = 0; c < C; ++c) {
                I begin{};
                if constexpr (kIsInt8) begin = inputs.sums[c * input_blocks + block] * -128 + I{};
                for (int r = 0; r < R; ++r) {
                    for (int v = 0; v < kVectors; ++v) dots[r][c][v] = begin;
                }
            }
#pragma GCC unroll 8
            for (int quad = 0; quad < kBlock / 4; ++quad) {
                I read[R][kVectors];
                for (int r = 0; r < R; ++r) {
                    for (int v = 0; v < kVectors; ++v) read[r][v] = read_quad(codes[r], block, quad, v);
                }
                for (int c = 0; c < C; ++c) {
                    const int8_t* x = inputs.codes + (c * inputs.stride / 4) * kQuadBytes +
                                      (block * (kBlock / 4) + quad) * kQuadBytes;
                    for (int r = 0; r < R; ++r) {
                        for (int v = 0; v < kVectors; ++v) {
                            dots[r][c][v] = dot_quads(dots[r][c][v], read[r][v], x);
                        }
                    }
                }
            }
            for (int r = 0; r < R; ++r) {
                for (int v = 0; v < kVectors; ++v) {
                    const F scale = load_half(scales[r] + block * kPanel + v * kLanes);
                    F minimum{};
                    if constexpr (kHasMinimums) {
                        minimum = load_half(minimums[r] + block * kPanel + v * kLanes);
                    }
                    for (int c = 0; c < C; ++c) {
                        const float of_input = inputs.scales[c * input_blocks + block];
                        const F dot = __builtin_convertvector(dots[r][c][v], F);
                        sum[r][c][v] = fma(scale * broadcast(of_input), dot, sum[r][c][v]);
                        if constexpr (kHasMinimums) {
                            const float total = of_input * static_cast<float>(
                                                               inputs.sums[c * input_blocks + block]);
                            sum[r][c][v] = fma(minimum, broadcast(-total), sum[r][c][v]);
                        }
                    }
                }
            }
        }
        for (int c = 0; c < C; ++c) {
            for (int r = 0; r < R; ++r) {
                write_out(weights, panel + r, sum[r][c], y + c * ldy + (panel + r) * kPanel, write);
            }
        }
    }

    static inline I read_quad(const uint8_t* panel, long block, int quad, int vector) {
        I codes;
        if constexpr (kIsInt8) {
            const uint8_t* at = panel + (block * (kBlock / 4) + quad) * kPanel * 4;
            std::memcpy(&codes, at + vector * sizeof codes, sizeof codes);
            return codes;
        }
        const uint8_t* at = panel + (block * (kBlock / 8) + quad / 2) * kPanel * 4;
        std::memcpy(&codes, at + vector * sizeof codes, sizeof codes);
        return quad % 2 ? (I)((U)codes >> 4) & 0x0f0f0f0f : codes & 0x0f0f0f0f;
    }
};

template <Format kFormat, int R, int C>
using Tile = std::conditional_t<is_quantized(kFormat), CodeTile<kFormat, R, C>,
                                FloatTile<kFormat, R, C>>;

template <Format kFormat, int C>
void run_panels(const Packed& weights, long first, long end, const Inputs& inputs, float* y,
                long ldy, Write write, Ahead& ahead) {
    constexpr int kPanels = tile_panels(kFormat, C);
    long panel = first;
    for (; panel + kPanels <= end; panel += kPanels) {
        Tile<kFormat, kPanels, C>::run(weights, panel, inputs, y, ldy, write, ahead);
    }
    for (; panel < end; ++panel) {
        Tile<kFormat, 1, C>::run(weights, panel, inputs, y, ldy, write, ahead);
    }
}

// A group of panels stays in the cache while all tokens pass by, and the next is fetched meanwhile.
// What only passes once is read at the memory's speed: nothing is fetched ahead of it.
template <Format kFormat>
void run_tokens(const Packed& weights, Panels panels, const Inputs& inputs, long num_tokens,
                float* y, long ldy, Write write) {
    using Run = void (*)(const Packed&, long, long, const Inputs&, float*, long, Write, Ahead&);
    constexpr int kMost = max_tokens(kFormat);
    static constexpr auto kRuns = []<int... C>(std::integer_sequence<int, C...>) {
        return std::array<Run, sizeof...(C)>{run_panels<kFormat, C + 1>...};
    }(std::make_integer_sequence<int, kMost>());
    constexpr long kPanels = tile_panels(kFormat, kMost);
    const long passes = (num_tokens + kMost - 1) / kMost;
    const long step = passes == 1 ? panels.end - panels.first : kPanels;
    for (long panel = panels.first; panel < panels.end; panel += step) {
        const long end = std::min(panel + step, panels.end);
        Ahead ahead;
        if (passes > 1) {
            ahead = Ahead(weights, end < panels.end ? end : panels.next, kPanels, passes);
        }
        // Passes of about one size: one of a single token would take as long as one of many.
        for (long pass = 0; pass < passes; ++pass) {
            const long token = pass * num_tokens / passes;
            const long count = (pass + 1) * num_tokens / passes - token;
            kRuns[count - 1](weights, panel, end, inputs.from(token), y + token * ldy, ldy, write,
                             ahead);
        }
    }
}

inline void linear(const Packed& weights, Panels panels, const Inputs& inputs, long num_tokens,
                   float* y, long ldy, Write write) {
    switch (weights.format) {
#define SESSION_SERVER_CASE(format) \
    case Format::format:            \
        return run_tokens<Format::format>(weights, panels, inputs, num_tokens, y, ldy, write)
        SESSION_SERVER_CASE(kFloat32);
        SESSION_SERVER_CASE(kBFloat16);
        SESSION_SERVER_CASE(kFloat16);
        SESSION_SERVER_CASE(kInt8);
        SESSION_SERVER_CASE(kInt4);
#undef SESSION_SERVER_CASE
    }
}

inline InputForm input_form(Format format) {
    if (is_quantized(format)) return InputForm::kInt8;
    return format == Format::kBFloat16 && kHasBf16Dot ? InputForm::kBFloat16 : InputForm::kFloat32;
}

inline void quantize(const float* x, long n, int8_t* codes, float* scales, int32_t* sums) {
    for (long block = 0; block * kBlock < n; ++block) {
        float values[kBlock] = {};
        long count = std::min(kBlock, n - block * kBlock);
        std::memcpy(values, x + block * kBlock, count * sizeof(float));
        F most{}, zeros{};
        for (int i = 0; i < kBlock; i += kLanes) {
            F v = load(values + i);
            most = max(most, max(v, -v));
            zeros += v * 0.0f;
        }
        const float scale = largest(most) / 127.0f;
        const float inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        scales[block] = scale + sum(zeros);  // codes cannot be NaN or infinite; a scale can
        const F magic = broadcast(12582912.0f);
        int8_t rounded[kBlock];
        I totals{};
        for (int i = 0; i < kBlock; i += kLanes) {
            // In this order what is not a number becomes a bound, whose sums do not overflow.
            F bounded = max(min(load(values + i) * inverse, broadcast(127.0f)), broadcast(-127.0f));
            I whole = (I)(bounded + magic) - (I)magic;
            totals += whole;
            B narrow = __builtin_convertvector(whole, B);
            std::memcpy(rounded + i, &narrow, sizeof narrow);
        }
        sums[block] = static_cast<int32_t>(sum(__builtin_convertvector(totals, F)));
        int8_t* out = codes + block * kBlock / 4 * kQuadBytes;
        if constexpr (kQuadBytes == 4) {
            std::memcpy(out, rounded, sizeof rounded);
        } else {
            for (int i = 0; i < kBlock; i += 4) {
                const int16_t pairs[4] = {rounded[i], rounded[i + 2], rounded[i + 1], rounded[i + 3]};
                std::memcpy(out + i * 2, pairs, sizeof pairs);
            }
        }
    }
}

inline void convert(const float* x, long n, const Inputs& inputs, long token) {
    Inputs at = inputs.from(token);
    switch (inputs.form) {
        case InputForm::kFloat32: {
            auto* floats = const_cast<float*>(at.floats);
            if (floats != x) std::memcpy(floats, x, n * sizeof(float));
            if (n % 2) floats[n] = 0.0f;
            break;
        }
        case InputForm::kBFloat16: {
            auto* out = const_cast<uint16_t*>(at.bf16);
            long i = 0;
#if defined(__AVX512BF16__)
            for (; i + kLanes <= n; i += kLanes) {
                __m256bh rounded = _mm512_cvtneps_pbh((__m512)load(x + i));
                std::memcpy(out + i, &rounded, sizeof rounded);
            }
#endif
            for (; i < n; ++i) out[i] = to_bf16(x[i]);
            if (n % 2) out[n] = 0;
            break;
        }
        case InputForm::kInt8:
            quantize(x, n, const_cast<int8_t*>(at.codes), const_cast<float*>(at.scales),
                     const_cast<int32_t*>(at.sums));
    }
}

}  // namespace session_server::SESSION_SERVER_ISA
