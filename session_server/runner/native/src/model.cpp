#include "model.h"

#include <algorithm>
#include <stdexcept>

#include "step.h"

namespace session_server {

Decoder::Memory& Decoder::working_memory() {
    if (!memory_) memory_ = std::make_shared<Memory>(*this);
    return *memory_;
}

size_t Decoder::reserve(const Team& team, long num_tokens) {
    working_memory().reserve(num_tokens, team.size());
    return working_memory().num_bytes();
}

void Decoder::forward(Team& team, const StepInputs& step, float* hidden) {
    for (long t = 0; t < step.num_tokens; ++t) {
        if (step.token_ids[t] < 0 || step.token_ids[t] >= vocab_size) {
            throw std::out_of_range("a token id lies outside of the vocabulary");
        }
    }
    Memory& memory = working_memory();
    memory.reserve(step.num_tokens, team.size());
    team.run(is_worth_sharing(memory.needs.num_bytes * std::max(1l, step.num_tokens / 4)),
             [&](Member& me) { Step(*this, memory, step, me).run(hidden); });
}

bool is_worth_sharing(size_t num_bytes) { return num_bytes >= (size_t{1} << 20); }

void apply_linear(Team& team, const Packed& weights, const float* x, long num_tokens, float* y) {
    if (num_tokens == 0) return;
    static thread_local Converted converted;
    converted.reserve(num_tokens, weights.inputs);
    const Kernels& table = kernels();
    const Inputs inputs = converted.as(table.input_form(weights.format));
    for (long t = 0; t < num_tokens; ++t) table.convert(x + t * weights.inputs, weights.inputs, inputs, t);
    const long tile = table.tile_panels(weights.format, num_tokens);
    const long chunks = (weights.panels() + tile - 1) / tile;
    team.run(is_worth_sharing(weights.num_bytes()), [&](Member& me) {
        me.share(chunks, [&](long chunk) {
            const long first = chunk * tile;
            table.linear(weights, tile_of(me, weights, first, tile), inputs, num_tokens, y,
                         weights.outputs, {});
        });
    });
}

}  // namespace session_server
