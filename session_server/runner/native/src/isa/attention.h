// Attention over paged KV, read in place.
//
// Two ways to use the lanes. One new token of a row (`attend_one`): lanes are elements of a head;
// the heads of a group share each key while it is in the cache. Several tokens, or sizes that are
// no multiple of a vector (`attend_many`): lanes are queries, which fill a vector however small a
// head is, and no sum over lanes is needed. Both go through the keys in blocks of kKeys with a
// running maximum (Milakov and Gimelshein 2018; Dao et al. 2022). Blocks begin at multiples of
// kKeys. A token's result does not depend on the other rows. It does, in the last bits, on whether
// its row has other tokens in the step: the two ways sum in different orders.

#pragma once

#include <algorithm>
#include <cmath>

#include "../kernels.h"
#include "vec.h"

namespace session_server::SESSION_SERVER_ISA {

constexpr long kKeys = 64;
constexpr long kLaneQueries = 3 * kLanes;  // three vectors by kRows sums leave registers for inputs
constexpr float kUnseen = -1e30f;  // below any score, and finite: differences of it are no NaN

template <DType kType>
inline F load_as(const void* base, long element) {
    if constexpr (kType == DType::kFloat32) {
        return load(static_cast<const float*>(base) + element);
    } else if constexpr (kType == DType::kBFloat16) {
        return load_bf16(static_cast<const uint16_t*>(base) + element);
    } else {
        return load_half(static_cast<const uint16_t*>(base) + element);
    }
}

template <DType kType>
inline float element_as(const void* base, long element) {
    if constexpr (kType == DType::kFloat32) {
        return static_cast<const float*>(base)[element];
    } else if constexpr (kType == DType::kBFloat16) {
        return to_float(static_cast<const uint16_t*>(base)[element]);
    } else {
        return half_to_float(static_cast<const uint16_t*>(base)[element]);
    }
}

// Elements from the base of the positions [first, first + count).
inline void locate(const KvRows& kv, long first, long count, long* elements) {
    long page = first / kv.page_size, within = first % kv.page_size;
    for (long i = 0; i < count; ++page, within = 0) {
        long at = static_cast<long>(kv.pages[page]) * kv.page_stride + within * kv.stride;
        for (; within < kv.page_size && i < count; ++within, ++i, at += kv.stride) elements[i] = at;
    }
}

// Where the keys of a block lie, and those of the block after it, which are fetched meanwhile: pages
// lie anywhere, so the CPU cannot guess what comes next.
struct Block {
    long begin = 0;
    long count = 0;
    long elements[kKeys];

    // The block from position `from` on; empty at `end`.
    void locate_from(const KvRows& kv, long from, long end) {
        begin = from;
        count = std::max(0l, std::min(from / kKeys * kKeys + kKeys, end) - from);
        locate(kv, begin, count, elements);
    }

    // Fetch `dim` elements of the rows [first, first + number).
    template <DType kType>
    inline void fetch(const void* base, long dim, long first, long number) const {
        constexpr long kSize = kType == DType::kFloat32 ? 4 : 2, kLine = 64;
        const long end = std::min(first + number, count);
        for (long i = first; i < end; ++i) {
            const char* row = static_cast<const char*>(base) + elements[i] * kSize;
            for (long at = 0; at < dim * kSize; at += kLine) __builtin_prefetch(row + at, 0, 2);
        }
    }
};

inline F capped(F score, float softcap) {
    return softcap == 0.0f ? score : softcap * tanh(score * (1.0f / softcap));
}

// ---- one token ----

// Scores of one head with kLanes keys.
template <DType kType>
inline void score_one(const KvRows& kv, const long* keys, const float* q, float* scores) {
    F acc[kLanes] = {};
    for (long d = 0; d < kv.key_dim; d += kLanes) {
        const F of_query = load(q + d);
        for (int j = 0; j < kLanes; ++j) {
            acc[j] = fma(load_as<kType>(kv.keys, keys[j] + d), of_query, acc[j]);
        }
    }
    store(scores, sums(acc));
}

// Scores of two heads, [2][kKeys], with kLanes keys; each key is read once for both.
template <DType kType>
inline void score_two(const KvRows& kv, const long* keys, const float* q, float* scores) {
    constexpr int kHalf = kLanes / 2;
    for (int first = 0; first < kLanes; first += kHalf) {
        F acc[kLanes] = {};
        for (long d = 0; d < kv.key_dim; d += kLanes) {
            const F low = load(q + d), high = load(q + kv.key_dim + d);
            for (int j = 0; j < kHalf; ++j) {
                const F key = load_as<kType>(kv.keys, keys[first + j] + d);
                acc[j] = fma(key, low, acc[j]);
                acc[kHalf + j] = fma(key, high, acc[kHalf + j]);
            }
        }
        const F both = sums(acc);
        std::memcpy(scores + first, &both, kHalf * sizeof(float));
        std::memcpy(scores + kKeys + first, reinterpret_cast<const float*>(&both) + kHalf,
                    kHalf * sizeof(float));
    }
}

template <DType kType>
void attend_one(const KvRows& kv, const AttentionRule& rule, const Queries& queries,
                Scratch scratch) {
    const long dim = kv.key_dim, values = kv.value_dim, group = queries.group;
    float* q = scratch.floats;         // [group][dim]
    float* scores = q + group * dim;   // [group][kKeys]
    float* out = scores + group * kKeys;  // [group][values]
    float* most = out + group * values;
    float* total = most + group;
    for (long h = 0; h < group; ++h) {
        for (long d = 0; d < dim; ++d) q[h * dim + d] = queries.queries[h * dim + d] * rule.scale;
        most[h] = kUnseen;
        total[h] = 0.0f;
    }
    std::fill(out, out + group * values, 0.0f);
    const long end = queries.position + 1;
    const long first = rule.window > 0 ? std::max(0l, end - rule.window) : 0;
    Block blocks[2];
    blocks[0].locate_from(kv, first, end);
    for (int at = 0; blocks[at].count > 0; at ^= 1) {
        Block& next = blocks[at ^ 1];
        const long count = blocks[at].count;
        long* keys = blocks[at].elements;
        next.locate_from(kv, blocks[at].begin + count, end);
        const long padded = round_up(count, kLanes);
        for (long i = count; i < padded; ++i) keys[i] = keys[count - 1];
        for (long i = 0; i < padded; i += kLanes) {
            next.fetch<kType>(kv.keys, dim, i, kLanes);
            next.fetch<kType>(kv.values, values, i, kLanes);
            for (long h = 0; h < group; h += 2) {
                float* of_head = scores + h * kKeys + i;
                if (h + 1 < group) {
                    score_two<kType>(kv, keys + i, q + h * dim, of_head);
                } else {
                    score_one<kType>(kv, keys + i, q + h * dim, of_head);
                }
            }
            for (long h = 0; rule.softcap != 0.0f && h < group; ++h) {
                float* of_head = scores + h * kKeys + i;
                store(of_head, capped(load(of_head), rule.softcap));
            }
        }
        for (long h = 0; h < group; ++h) {
            float* of_head = scores + h * kKeys;
            for (long i = count; i < padded; ++i) of_head[i] = -INFINITY;
            F of_block = load(of_head);
            for (long i = kLanes; i < padded; i += kLanes) of_block = max(load(of_head + i), of_block);
            const float next = std::max(most[h], largest(of_block));
            F sum_of{};
            for (long i = 0; i < padded; i += kLanes) {
                F weight = exp(load(of_head + i) - broadcast(next));
                store(of_head + i, weight);
                sum_of += weight;
            }
            const float kept = std::exp(most[h] - next);
            total[h] = total[h] * kept + sum(sum_of);
            most[h] = next;
            if (kept != 1.0f) {
                for (long d = 0; d < values; ++d) out[h * values + d] *= kept;
            }
        }
        // Four heads of a group share each value that is loaded.
        const auto weigh = [&]<int kHeads, int kWide>(long h, long d) {
            F acc[kHeads][kWide];
            for (int g = 0; g < kHeads; ++g) {
                for (int v = 0; v < kWide; ++v) acc[g][v] = load(out + (h + g) * values + d + v * kLanes);
            }
            for (long i = 0; i < count; ++i) {
                F value[kWide];
                for (int v = 0; v < kWide; ++v) value[v] = load_as<kType>(kv.values, keys[i] + d + v * kLanes);
                for (int g = 0; g < kHeads; ++g) {
                    F weight = broadcast(scores[(h + g) * kKeys + i]);
                    for (int v = 0; v < kWide; ++v) acc[g][v] = fma(weight, value[v], acc[g][v]);
                }
            }
            for (int g = 0; g < kHeads; ++g) {
                for (int v = 0; v < kWide; ++v) store(out + (h + g) * values + d + v * kLanes, acc[g][v]);
            }
        };
        constexpr int kWide = kLanes == 16 ? 4 : 2;
        for (long d = 0; d < values;) {
            const bool is_wide = d + kWide * kLanes <= values;
            for (long h = 0; h < group;) {
                const long left = group - h;
                if (is_wide) {
                    if (left >= 4) weigh.template operator()<4, kWide>(h, d), h += 4;
                    else if (left >= 2) weigh.template operator()<2, kWide>(h, d), h += 2;
                    else weigh.template operator()<1, kWide>(h, d), h += 1;
                } else {
                    if (left >= 4) weigh.template operator()<4, 1>(h, d), h += 4;
                    else weigh.template operator()<1, 1>(h, d), h += 1;
                }
            }
            d += is_wide ? kWide * kLanes : kLanes;
        }
    }
    for (long h = 0; h < group; ++h) {
        float scale = 1.0f / total[h];
        if (queries.sinks != nullptr) {
            const float next = std::max(most[h], queries.sinks[h]);
            const float kept = std::exp(most[h] - next);
            scale = kept / (total[h] * kept + std::exp(queries.sinks[h] - next));
        }
        for (long d = 0; d < values; ++d) queries.out[h * values + d] = out[h * values + d] * scale;
    }
}

// ---- several tokens ----

template <int kVecs, int kRows>
inline void score_rows(const float* q, long dim, const float* const* keys, float* scores) {
    F acc[kRows][kVecs] = {};
    for (long d = 0; d < dim; ++d) {
        F of_queries[kVecs];
        for (int v = 0; v < kVecs; ++v) of_queries[v] = load(q + (d * kVecs + v) * kLanes);
        for (int j = 0; j < kRows; ++j) {
            F key = broadcast(keys[j][d]);
            for (int v = 0; v < kVecs; ++v) acc[j][v] = fma(of_queries[v], key, acc[j][v]);
        }
    }
    for (int j = 0; j < kRows; ++j) {
        for (int v = 0; v < kVecs; ++v) store(scores + (j * kVecs + v) * kLanes, acc[j][v]);
    }
}

template <int kVecs, int kWide>
inline void weigh_values(const float* weights, long count, const float* const* rows, long d,
                         const F (&kept)[kVecs], float* out) {
    F acc[kWide][kVecs];
    for (int j = 0; j < kWide; ++j) {
        for (int v = 0; v < kVecs; ++v) {
            acc[j][v] = load(out + ((d + j) * kVecs + v) * kLanes) * kept[v];
        }
    }
    for (long i = 0; i < count; ++i) {
        F weight[kVecs];
        for (int v = 0; v < kVecs; ++v) weight[v] = load(weights + (i * kVecs + v) * kLanes);
        for (int j = 0; j < kWide; ++j) {
            F value = broadcast(rows[i][d + j]);
            for (int v = 0; v < kVecs; ++v) acc[j][v] = fma(weight[v], value, acc[j][v]);
        }
    }
    for (int j = 0; j < kWide; ++j) {
        for (int v = 0; v < kVecs; ++v) store(out + ((d + j) * kVecs + v) * kLanes, acc[j][v]);
    }
}

template <DType kType>
inline void widen(const void* base, const long* elements, long count, long dim, float* out,
                  const float** rows) {
    for (long i = 0; i < count; ++i) {
        if constexpr (kType == DType::kFloat32) {
            rows[i] = static_cast<const float*>(base) + elements[i];
        } else {
            float* row = out + i * dim;
            long d = 0;
            for (; d + kLanes <= dim; d += kLanes) store(row + d, load_as<kType>(base, elements[i] + d));
            for (; d < dim; ++d) row[d] = element_as<kType>(base, elements[i] + d);
            rows[i] = row;
        }
    }
}

// Queries [first, first + count) of all (token, head) pairs, count <= kVecs * kLanes.
template <DType kType, int kVecs>
void attend_lanes(const KvRows& kv, const AttentionRule& rule, const Queries& queries, long first,
                  long count, Scratch scratch) {
    constexpr long kWidth = kVecs * kLanes;
    constexpr int kRows = kLanes == 16 ? 8 : 4;
    const long dim = kv.key_dim, values = kv.value_dim, group = queries.group;
    float* q = scratch.floats;             // [dim][kWidth]
    float* scores = q + dim * kWidth;      // [kKeys][kWidth]
    float* out = scores + kKeys * kWidth;  // [values][kWidth]
    float* wide_keys = out + values * kWidth;       // [kKeys][dim]
    float* wide_values = wide_keys + kKeys * dim;   // [kKeys][values]
    std::fill(q, q + dim * kWidth, 0.0f);
    std::fill(out, out + values * kWidth, 0.0f);
    float last_key[kWidth];
    for (long lane = 0; lane < kWidth; ++lane) {
        const long query = std::min(lane, count - 1) + first, token = query / group;
        last_key[lane] = static_cast<float>(queries.position + token);
        if (lane >= count) continue;
        const float* from = queries.queries + token * queries.query_stride + query % group * dim;
        for (long d = 0; d < dim; ++d) q[d * kWidth + lane] = from[d] * rule.scale;
    }
    F most[kVecs], total[kVecs];
    for (int v = 0; v < kVecs; ++v) {
        most[v] = broadcast(kUnseen);
        total[v] = F{};
    }
    const long first_token = first / group, last_token = (first + count - 1) / group;
    const long end = queries.position + last_token + 1;
    // Positions seen by all queries of this call need no mask.
    const long first_seen =
        rule.window > 0 ? std::max(0l, queries.position + first_token + 1 - rule.window) : 0;
    const long seen_by_all_from =
        rule.window > 0 ? std::max(0l, queries.position + last_token + 1 - rule.window) : 0;
    const long seen_by_all_to = queries.position + first_token + 1;
    const float* key_rows[kKeys];
    const float* value_rows[kKeys];
    Block blocks[2];
    blocks[0].locate_from(kv, first_seen, end);
    for (int at = 0; blocks[at].count > 0; at ^= 1) {
        Block& next = blocks[at ^ 1];
        const long begin = blocks[at].begin, num_keys = blocks[at].count;
        const long* elements = blocks[at].elements;
        next.locate_from(kv, begin + num_keys, end);
        widen<kType>(kv.keys, elements, num_keys, dim, wide_keys, key_rows);
        if (kv.values == kv.keys) {
            std::copy(key_rows, key_rows + num_keys, value_rows);
        } else {
            widen<kType>(kv.values, elements, num_keys, values, wide_values, value_rows);
        }
        long i = 0;
        for (; i + kRows <= num_keys; i += kRows) {
            next.fetch<kType>(kv.keys, dim, i, kRows);
            if (kv.values != kv.keys) next.fetch<kType>(kv.values, values, i, kRows);
            score_rows<kVecs, kRows>(q, dim, key_rows + i, scores + i * kWidth);
        }
        for (; i < num_keys; ++i) score_rows<kVecs, 1>(q, dim, key_rows + i, scores + i * kWidth);
        const bool is_masked = begin < seen_by_all_from || begin + num_keys > seen_by_all_to;
        F kept[kVecs];
        for (int v = 0; v < kVecs; ++v) {
            F next = most[v];
            F last = load(last_key + v * kLanes);
            F before = rule.window > 0 ? last - static_cast<float>(rule.window) : broadcast(-1.0f);
            for (i = 0; i < num_keys; ++i) {
                float* at = scores + i * kWidth + v * kLanes;
                F score = capped(load(at), rule.softcap);
                if (is_masked) {
                    F key = broadcast(static_cast<float>(begin + i));
                    score = key > last ? broadcast(-INFINITY) : score;
                    score = key <= before ? broadcast(-INFINITY) : score;
                }
                store(at, score);
                next = max(score, next);
            }
            kept[v] = exp(most[v] - next);
            F sum_of{};
            for (i = 0; i < num_keys; ++i) {
                float* at = scores + i * kWidth + v * kLanes;
                F weight = exp(load(at) - next);
                store(at, weight);
                sum_of += weight;
            }
            total[v] = fma(total[v], kept[v], sum_of);
            most[v] = next;
        }
        long d = 0;
        for (; d + kRows <= values; d += kRows) {
            weigh_values<kVecs, kRows>(scores, num_keys, value_rows, d, kept, out);
        }
        for (; d < values; ++d) {
            weigh_values<kVecs, 1>(scores, num_keys, value_rows, d, kept, out);
        }
    }
    float scales[kWidth];
    for (int v = 0; v < kVecs; ++v) store(scales + v * kLanes, 1.0f / total[v]);
    if (queries.sinks != nullptr) {
        float of_most[kWidth], of_total[kWidth];
        for (int v = 0; v < kVecs; ++v) {
            store(of_most + v * kLanes, most[v]);
            store(of_total + v * kLanes, total[v]);
        }
        for (long lane = 0; lane < count; ++lane) {
            const float sink = queries.sinks[(first + lane) % group];
            const float next = std::max(of_most[lane], sink);
            const float left = std::exp(of_most[lane] - next);
            scales[lane] = left / (of_total[lane] * left + std::exp(sink - next));
        }
    }
    for (long lane = 0; lane < count; ++lane) {
        const long query = first + lane, token = query / group;
        float* to = queries.out + token * queries.out_stride + query % group * values;
        for (long d = 0; d < values; ++d) to[d] = out[d * kWidth + lane] * scales[lane];
    }
}

template <DType kType>
void attend_as(const KvRows& kv, const AttentionRule& rule, const Queries& queries,
               Scratch scratch) {
    // A latent has one head for all queries: they fill the lanes.
    const bool is_latent = kv.values == kv.keys;
    if (queries.is_alone && kv.key_dim % kLanes == 0 && kv.value_dim % kLanes == 0 &&
        !is_latent) {
        attend_one<kType>(kv, rule, queries, scratch);
        return;
    }
    const long total = queries.num_tokens * queries.group;
    for (long first = 0; first < total;) {
        const long count = std::min<long>(total - first, kLaneQueries);
        if (count > 2 * kLanes) {
            attend_lanes<kType, 3>(kv, rule, queries, first, count, scratch);
        } else if (count > kLanes) {
            attend_lanes<kType, 2>(kv, rule, queries, first, count, scratch);
        } else {
            attend_lanes<kType, 1>(kv, rule, queries, first, count, scratch);
        }
        first += count;
    }
}

inline void attend(const KvRows& kv, const AttentionRule& rule, const Queries& queries,
                   Scratch scratch) {
    switch (kv.dtype) {
        case DType::kFloat32: return attend_as<DType::kFloat32>(kv, rule, queries, scratch);
        case DType::kBFloat16: return attend_as<DType::kBFloat16>(kv, rule, queries, scratch);
        case DType::kFloat16: return attend_as<DType::kFloat16>(kv, rule, queries, scratch);
    }
}

}  // namespace session_server::SESSION_SERVER_ISA
