// What Python sees: packed linears, layers built of them, and the decoder that runs a step.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <stdexcept>
#include <string>

#include "checks.h"
#include "kernels.h"
#include "model.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace session_server;

namespace {

using Any = nb::ndarray<nb::device::cpu, nb::c_contig>;
using FloatArray = nb::ndarray<const float, nb::device::cpu, nb::c_contig>;
using Ints = nb::ndarray<const int64_t, nb::device::cpu, nb::c_contig>;
using Output = nb::ndarray<float, nb::device::cpu, nb::c_contig>;

DType dtype_of(const Any& array) {
    if (array.dtype() == nb::dtype<float>()) return DType::kFloat32;
    if (array.dtype().bits == 16) {
        const auto code = static_cast<nb::dlpack::dtype_code>(array.dtype().code);
        if (code == nb::dlpack::dtype_code::Bfloat) return DType::kBFloat16;
        if (code == nb::dlpack::dtype_code::Float) return DType::kFloat16;
    }
    throw std::invalid_argument("an array is float32, bfloat16 or float16");
}

Format format_named(const std::string& name) {
    if (name == "float32") return Format::kFloat32;
    if (name == "bfloat16") return Format::kBFloat16;
    if (name == "float16") return Format::kFloat16;
    if (name == "int8") return Format::kInt8;
    if (name == "int4") return Format::kInt4;
    throw std::invalid_argument("no format of weights is named " + name);
}

Floats floats(const std::optional<FloatArray>& array) {
    if (!array) return {};
    return Floats(array->data(), array->data() + array->size());
}

Norm norm_of(const FloatArray& weight, float eps) { return {floats(weight), eps}; }

// The width of a convolution's taps [width][channels].
long width_of(const FloatArray& taps) {
    const long width = taps.ndim() == 2 ? static_cast<long>(taps.shape(0)) : 0;
    if (width < 1 || width > kMaxConvWidth) {
        throw std::invalid_argument("taps are [1 to " + std::to_string(kMaxConvWidth) +
                                    ", channels]");
    }
    return width;
}

void check_alike(const std::vector<GatedMlp>& experts) {
    const auto is_like = [](const Packed& a, const Packed& b) {
        return a.format == b.format && a.outputs == b.outputs && a.inputs == b.inputs;
    };
    if (experts.empty()) throw std::invalid_argument("a layer of experts has at least one");
    const GatedMlp& any = experts.front();
    for (const GatedMlp& expert : experts) {
        if (!is_like(*expert.gate_up, *any.gate_up) || !is_like(*expert.down, *any.down)) {
            throw std::invalid_argument("the experts of a layer have one format and one size");
        }
    }
}

std::unique_ptr<Team>& team() {
    static auto* instance = new std::unique_ptr<Team>();  // threads outlive static destructors
    return *instance;
}

Team& the_team() {
    if (!team()) team() = std::make_unique<Team>(1);
    return *team();
}

void add_bias(Packed& packed, const std::optional<FloatArray>& bias) {
    if (!bias) return;
    if (static_cast<long>(bias->size()) != packed.outputs) throw std::invalid_argument("a bias is [outputs]");
    set_bias(packed, bias->data());
}

std::shared_ptr<Packed> linear(const Any& weight, const std::string& format,
                               const std::optional<FloatArray>& bias) {
    if (weight.ndim() != 2) throw std::invalid_argument("a weight is [outputs, inputs]");
    const long outputs = static_cast<long>(weight.shape(0)), inputs = static_cast<long>(weight.shape(1));
    std::shared_ptr<Packed> packed;
    {
        nb::gil_scoped_release released;
        packed = std::make_shared<Packed>(pack(weight.data(), dtype_of(weight), outputs, inputs,
                                               inputs, format_named(format)));
    }
    add_bias(*packed, bias);
    return packed;
}

std::shared_ptr<Packed> linear_of_codes(nb::ndarray<nb::device::cpu, nb::c_contig, nb::ro> codes,
                                        int num_bits, const FloatArray& scales,
                                        const std::optional<FloatArray>& minimums,
                                        const std::optional<FloatArray>& bias) {
    if (codes.ndim() != 2) throw std::invalid_argument("codes are [outputs, inputs]");
    const long outputs = static_cast<long>(codes.shape(0)), inputs = static_cast<long>(codes.shape(1));
    const size_t num_blocks = outputs * (round_up(inputs, kBlock) / kBlock);
    if (scales.size() != num_blocks || (minimums && minimums->size() != num_blocks)) {
        throw std::invalid_argument("codes have scales by block of 32");
    }
    auto packed = std::make_shared<Packed>(pack_codes(codes.data(), num_bits, scales.data(),
                                                      minimums ? minimums->data() : nullptr,
                                                      outputs, inputs));
    add_bias(*packed, bias);
    return packed;
}

// `rows`: int64 [n, 4]: row, start, num_tokens, offset. `states`: int64, for each row in order
// source, number of targets, then length and page of each; empty without states.
std::vector<Span> spans_of(const Ints& rows, const Ints& states) {
    std::vector<Span> spans;
    const int64_t* at = states.data();
    const int64_t* end = at + states.size();
    for (size_t i = 0; i < rows.shape(0); ++i) {
        const int64_t* row = rows.data() + 4 * i;
        Span& span = spans.emplace_back(Span{row[0], row[1], row[2], row[3], 0, {}});
        if (at == end) continue;
        span.source = *at++;
        for (int64_t left = *at++; left > 0; --left, at += 2) span.targets.emplace_back(at[0], at[1]);
    }
    return spans;
}

void forward(Decoder& decoder, const Ints& token_ids, const Ints& positions, const Ints& slots,
             const Ints& rows, const Ints& states, const Ints& wanted, const Output& hidden) {
    StepInputs step = {.token_ids = token_ids.data(),
                       .positions = positions.data(),
                       .num_tokens = static_cast<long>(token_ids.size()),
                       .slots = slots.data(),
                       .spans = spans_of(rows, states),
                       .wanted = wanted.data(),
                       .num_wanted = static_cast<long>(wanted.size())};
    Team& team = the_team();
    float* out = hidden.data();
    nb::gil_scoped_release released;
    decoder.forward(team, step, out);
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // weights live as long as the process, on purpose
    m.def("cpu", [] { return kernels().name; }, "Return the name of the kernels in use.");
    m.def("cpus", [] {
        std::vector<std::string> names;
        for (const char* name : {"avx512_bf16", "avx512", "avx2", "portable"}) {
            if (kernels_named(name) != nullptr) names.emplace_back(name);
        }
        return names;
    }, "Return the names of all kernels that this CPU runs, the best first.");
    m.def("use_cpu", [](const std::string& name) {
        const Kernels* named = kernels_named(name.c_str());
        if (named == nullptr) throw std::invalid_argument("this CPU has no kernels named " + name);
        use(*named);
    }, "name"_a);
    m.def("set_num_threads", [](int num_threads) {
        if (num_threads < 1) throw std::invalid_argument("a team has at least one thread");
        if (!team() || team()->size() != num_threads) {
            nb::gil_scoped_release released;
            team().reset();
            team() = std::make_unique<Team>(num_threads);
        }
    }, "num_threads"_a);
    m.def("num_threads", [] { return the_team().size(); });
    m.def("argmax", [](const FloatArray& logits, nb::ndarray<int64_t, nb::c_contig> tokens,
                       nb::ndarray<bool, nb::c_contig> is_finite) {
        const long rows = static_cast<long>(logits.shape(0)), size = static_cast<long>(logits.shape(1));
        Team& members = the_team();
        nb::gil_scoped_release released;
        members.run(is_worth_sharing(rows * size * sizeof(float)), [&](Member& me) {
            me.share(rows, [&](long row) {
                tokens.data()[row] =
                    kernels().argmax(logits.data() + row * size, size, is_finite.data() + row);
            });
        });
    }, "logits"_a, "tokens"_a, "is_finite"_a);

    nb::class_<Packed>(m, "Linear")
        .def(nb::new_(&linear), "weight"_a, "format"_a, "bias"_a = nb::none())
        .def_static("of_codes", linear_of_codes, "codes"_a, "num_bits"_a, "scales"_a,
                    "minimums"_a = nb::none(), "bias"_a = nb::none())
        .def_ro("outputs", &Packed::outputs)
        .def_ro("inputs", &Packed::inputs)
        .def_prop_ro("num_bytes", &Packed::num_bytes)
        .def("apply", [](const Packed& weights, const FloatArray& x, const Output& y) {
            const long num_tokens = static_cast<long>(x.size()) / weights.inputs;
            Team& members = the_team();
            nb::gil_scoped_release released;
            apply_linear(members, weights, x.data(), num_tokens, y.data());
        }, "x"_a, "y"_a);

    nb::class_<Norm>(m, "Norm").def(nb::new_([](const FloatArray& weight, float eps) {
        return norm_of(weight, eps);
    }), "weight"_a, "eps"_a);
    nb::class_<After>(m, "After").def(nb::new_([](std::optional<Norm> norm, float factor) {
        return After{std::move(norm), factor};
    }), "norm"_a = nb::none(), "factor"_a = 1.0f);
    nb::class_<AttentionRule>(m, "AttentionRule").def(nb::new_([](float scale, long window, float softcap) {
        return AttentionRule{scale, window, softcap};
    }), "scale"_a, "window"_a = 0, "softcap"_a = 0.0f);

    using Shared = std::shared_ptr<Packed>;
    nb::class_<GroupedQuery>(m, "GroupedQuery")
        .def(nb::new_([](Shared qkv, Shared output, std::tuple<long, long, long> heads, long rope,
                         long rotary_dim, bool is_gated, AttentionRule rule,
                         std::optional<Norm> head_norm,
                         std::optional<std::pair<Norm, Norm>> projection_norm,
                         std::optional<FloatArray> sinks) {
            const auto [num_heads, num_kv_heads, head_dim] = heads;
            return GroupedQuery{qkv, output, num_heads, num_kv_heads, head_dim, rope, rotary_dim,
                                is_gated, rule, std::move(head_norm), std::move(projection_norm),
                                floats(sinks)};
        }), "qkv"_a, "output"_a, "heads"_a, "rope"_a, "rotary_dim"_a, "is_gated"_a, "rule"_a,
             "head_norm"_a = nb::none(), "projection_norm"_a = nb::none(), "sinks"_a = nb::none());
    nb::class_<Latent>(m, "Latent")
        .def(nb::new_([](Shared down, std::optional<std::pair<Norm, Shared>> query, Norm norm,
                         std::vector<Shared> to_latent, std::vector<Shared> from_latent,
                         Shared output, std::tuple<long, long, long, long> sizes, long rope,
                         AttentionRule rule) {
            const auto [nope, rope_dim, rank, value] = sizes;
            const long num_heads = static_cast<long>(to_latent.size());
            std::optional<std::pair<Norm, Linear>> of_query;
            if (query) of_query.emplace(query->first, query->second);
            return Latent{down, std::move(of_query), std::move(norm),
                          {to_latent.begin(), to_latent.end()},
                          {from_latent.begin(), from_latent.end()},
                          output, num_heads, nope, rope_dim, rank, value, rope, rule};
        }), "down"_a, "query"_a.none(), "norm"_a, "to_latent"_a, "from_latent"_a, "output"_a,
             "sizes"_a, "rope"_a, "rule"_a);
    nb::class_<ShortConv>(m, "ShortConv")
        .def(nb::new_([](Shared inputs, Shared output, const FloatArray& taps,
                         std::optional<FloatArray> bias) {
            const long width = width_of(taps), channels = static_cast<long>(taps.shape(1));
            return ShortConv{inputs, output, floats(taps), floats(bias), channels, width};
        }), "inputs"_a, "output"_a, "taps"_a, "bias"_a.none());
    nb::class_<GatedDelta>(m, "GatedDelta")
        .def(nb::new_([](Shared inputs, Shared output, const FloatArray& taps,
                         const FloatArray& step_bias, const FloatArray& rates, Norm norm,
                         std::tuple<long, long, long, long> sizes) {
            const auto [key_heads, value_heads, key_dim, value_dim] = sizes;
            return GatedDelta{inputs, output, floats(taps), floats(step_bias), floats(rates),
                              std::move(norm), key_heads, value_heads, key_dim, value_dim,
                              width_of(taps)};
        }), "inputs"_a, "output"_a, "taps"_a, "step_bias"_a, "rates"_a, "norm"_a, "sizes"_a);
    nb::class_<Mamba2>(m, "Mamba2")
        .def(nb::new_([](Shared inputs, Shared output, const FloatArray& taps,
                         std::optional<FloatArray> conv_bias,
                         std::tuple<FloatArray, FloatArray, FloatArray> of_heads, Norm norm,
                         std::tuple<long, long, long, long> sizes, std::pair<float, float> limits) {
            const auto [num_heads, head_dim, groups, state_size] = sizes;
            const auto& [step_bias, rates, skip] = of_heads;
            return Mamba2{inputs, output, floats(taps), floats(conv_bias), floats(step_bias),
                          floats(rates), floats(skip), std::move(norm), num_heads, head_dim, groups,
                          state_size, width_of(taps), limits.first, limits.second};
        }), "inputs"_a, "output"_a, "taps"_a, "conv_bias"_a.none(), "of_heads"_a, "norm"_a,
             "sizes"_a, "limits"_a);

    nb::class_<GatedMlp>(m, "GatedMlp")
        .def(nb::new_([](Shared gate_up, Shared down, const std::string& gate, float alpha, float limit) {
            GateRule rule = {.alpha = alpha, .limit = limit};
            if (gate == "silu") rule.kind = Gate::kSilu;
            else if (gate == "gelu_tanh") rule.kind = Gate::kGeluTanh;
            else if (gate == "clamped") rule.kind = Gate::kClamped;
            else throw std::invalid_argument("no gate is named " + gate);
            return GatedMlp{gate_up, down, rule};
        }), "gate_up"_a, "down"_a, "gate"_a, "alpha"_a, "limit"_a);
    nb::class_<Experts>(m, "Experts")
        .def(nb::new_([](Shared router, std::vector<GatedMlp> experts, std::optional<GatedMlp> shared,
                         long num_experts_per_tok, std::pair<bool, bool> sigmoid_and_norm,
                         std::pair<long, long> groups, float routed_scaling_factor,
                         std::optional<FloatArray> e_score_correction_bias) {
            check_alike(experts);
            return Experts{router, floats(e_score_correction_bias), std::move(experts), std::move(shared),
                           num_experts_per_tok, sigmoid_and_norm.first, sigmoid_and_norm.second,
                           groups.first, groups.second, routed_scaling_factor};
        }), "router"_a, "experts"_a, "shared"_a.none(), "num_experts_per_tok"_a,
             "sigmoid_and_norm"_a, "groups"_a, "routed_scaling_factor"_a,
             "e_score_correction_bias"_a.none());

    // The caller keeps the embedding, pools and tables alive.
    nb::class_<Decoder>(m, "Decoder")
        .def(nb::new_([](const Any& embedding, float scale, Norm norm,
                         const std::vector<std::pair<FloatArray, float>>& ropes) {
            Decoder decoder{};
            decoder.vocab_size = static_cast<long>(embedding.shape(0));
            decoder.hidden_size = static_cast<long>(embedding.shape(1));
            decoder.embedding = embedding.data();
            decoder.embedding_dtype = dtype_of(embedding);
            decoder.embedding_scale = scale;
            decoder.norm = std::move(norm);
            for (const auto& [frequencies, factor] : ropes) {
                decoder.ropes.push_back({floats(frequencies), factor});
            }
            return decoder;
        }), "embedding"_a, "scale"_a, "norm"_a, "ropes"_a)
        .def("add_pool", [](Decoder& decoder, const Any& storage, bool is_latent, long value_dim,
                            nb::ndarray<const int32_t, nb::device::cpu, nb::c_contig> table) {
            // [layers, 2, heads, pages, page_size, dim], or [layers, pages, page_size, dim]
            const size_t first = is_latent ? 1 : 3;
            Pool pool;
            pool.base = storage.data();
            pool.dtype = dtype_of(storage);
            pool.num_heads = is_latent ? 1 : static_cast<long>(storage.shape(2));
            pool.num_pages = static_cast<long>(storage.shape(first));
            pool.page_size = static_cast<long>(storage.shape(first + 1));
            pool.dim = static_cast<long>(storage.shape(first + 2));
            pool.value_dim = is_latent ? value_dim : pool.dim;
            pool.head_stride = pool.num_pages * pool.page_size * pool.dim;
            pool.value_offset = is_latent ? 0 : pool.num_heads * pool.head_stride;
            pool.layer_stride = (is_latent ? 1 : 2 * pool.num_heads) * pool.head_stride;
            pool.table = table.data();
            pool.num_rows = static_cast<long>(table.shape(0));
            pool.table_stride = static_cast<long>(table.shape(1));
            decoder.pools.push_back(std::move(pool));
        }, "storage"_a, "is_latent"_a, "value_dim"_a, "table"_a)
        .def("add_states", [](Decoder& decoder, const std::vector<Output>& parts) {
            Pool pool;
            pool.is_state = true;
            for (const Output& part : parts) {  // [layers, pages, *shape]
                pool.num_pages = static_cast<long>(part.shape(1));
                pool.parts.push_back(part.data());
                pool.part_sizes.push_back(
                    static_cast<long>(part.size() / part.shape(0) / part.shape(1)));
            }
            decoder.pools.push_back(std::move(pool));
        }, "parts"_a)
        .def("add_layer", [](Decoder& decoder, std::pair<std::optional<Norm>, After> mixer_norms,
                             Mixer mixer, std::pair<std::optional<Norm>, After> ffn_norms, Ffn ffn,
                             std::pair<long, long> pool) {
            Layer layer = {std::move(mixer_norms.first), std::move(mixer),
                           std::move(mixer_norms.second), std::move(ffn_norms.first),
                           std::move(ffn), std::move(ffn_norms.second), pool.first, pool.second};
            check_layer(decoder, layer);
            decoder.layers.push_back(std::move(layer));
        }, "mixer_norms"_a, "mixer"_a, "ffn_norms"_a, "ffn"_a, "pool"_a)
        .def("reserve", [](Decoder& decoder, long num_tokens) {
            return decoder.reserve(the_team(), num_tokens);
        }, "num_tokens"_a)
        .def("forward", forward, "token_ids"_a, "positions"_a, "slots"_a, "rows"_a, "states"_a,
             "wanted"_a, "hidden"_a);
}
