#include "step.h"

#include <cmath>
#include <cstring>

#include "scalars.h"

namespace session_server {

namespace {

// Of the weights that a waiting member begins to read.
constexpr size_t kFetchedBytes = size_t{64} << 10;

}  // namespace

void Step::run(float* out) {
    embed();
    for (const Layer& layer : model_.layers) {
        std::visit([&](const auto& mixer) { mix(layer, mixer); }, layer.mixer);
        std::visit([&](const auto& ffn) { feed(layer, ffn); }, layer.ffn);
    }
    me_.share(in_.num_wanted, [&](long i) {
        kernels_.rms_norm(hidden_ + in_.wanted[i] * size_, model_.norm.weight.data(),
                          model_.norm.eps, size_, out + i * size_);
    });
}

void Step::embed() {
    me_.share(num_tokens_, [&](long t) {
        const long id = in_.token_ids[t];
        float* row = hidden_ + t * size_;
        for (long i = 0; i < size_; ++i) {
            row[i] = element(model_.embedding, model_.embedding_dtype, id * size_ + i) *
                     model_.embedding_scale;
        }
        float* phases = memory_.phases.get(0);
        for (const Rope& rope : model_.ropes) {
            const long pairs = static_cast<long>(rope.frequencies.size());
            float* of_token = phases + t * 4 * pairs;
            const auto position = static_cast<float>(in_.positions[t]);
            for (long i = 0; i < pairs; ++i) {
                const float angle = position * rope.frequencies[i];
                const float cosine = std::cos(angle) * rope.factor;
                const float sine = std::sin(angle) * rope.factor;
                of_token[2 * i] = of_token[2 * i + 1] = cosine;
                of_token[2 * pairs + 2 * i] = -sine;
                of_token[2 * pairs + 2 * i + 1] = sine;
            }
            phases += num_tokens_ * 4 * pairs;
        }
    });
}

const float* Step::phases(long rope, long token) const {
    const float* at = memory_.phases.get(0);
    for (long i = 0; i < rope; ++i) {
        at += num_tokens_ * 4 * static_cast<long>(model_.ropes[i].frequencies.size());
    }
    return at + token * 4 * static_cast<long>(model_.ropes[rope].frequencies.size());
}

void Step::prepare(const std::optional<Norm>& norm, std::initializer_list<const Packed*> weights) {
    me_.share(num_tokens_, [&](long t) {
        const float* row = hidden_ + t * size_;
        float* normed = memory_.x.floats(t);
        if (norm) {
            kernels_.rms_norm(row, norm->weight.data(), norm->eps, size_, normed);
        } else {
            std::memcpy(normed, row, size_ * sizeof(float));
        }
        for (const Packed* of : weights) {
            kernels_.convert(normed, size_, memory_.x.as(form_of(*of)), t);
        }
    }, [&] { fetch(**weights.begin()); });
}

void Step::fetch(const Packed& weights) {
    if (num_tokens_ == 0) return;
    constexpr size_t kLine = 64;
    const size_t tile = weights.panel_bytes() * kernels_.tile_panels(weights.format, num_tokens_);
    const size_t size = weights.weights.size(), first = std::min(size, me_.index() * tile);
    const size_t count = std::min({tile, kFetchedBytes, size - first});
    const uint8_t* at = weights.weights.as<uint8_t>() + first;
    for (size_t line = 0; line < count; line += kLine) __builtin_prefetch(at + line, 0, 2);
}

void Step::linear(const Packed& weights, const Inputs& inputs, long num_tokens, float* y, long ldy,
                  Write write) {
    if (num_tokens == 0) return;
    const TokenBlocks blocks(num_tokens);
    const long tile = kernels_.tile_panels(weights.format, num_tokens);
    const long chunks = (weights.panels() + tile - 1) / tile;
    me_.share(blocks.count * chunks, [&](long item) {
        const long block = item / chunks, token = blocks.first(block);
        kernels_.linear(weights, tile_of(me_, weights, item % chunks * tile, tile),
                        inputs.from(token), blocks.size(block), y + token * ldy, ldy, write);
    });
}

void Step::add_linear(const Packed& weights, const After& after) {
    const Inputs inputs = memory_.x.as(form_of(weights));
    if (!after.norm) {
        linear(weights, inputs, num_tokens_, hidden_, size_, {true, after.factor});
        return;
    }
    linear(weights, inputs, num_tokens_, z_, size_, {});
    add_normed(after);
}

void Step::add_normed(const After& after) {
    me_.share(num_tokens_, [&](long t) {
        float* row = z_ + t * size_;
        float* to = hidden_ + t * size_;
        kernels_.rms_norm(row, after.norm->weight.data(), after.norm->eps, size_, row);
        for (long i = 0; i < size_; ++i) to[i] += row[i];
    });
}

}  // namespace session_server
