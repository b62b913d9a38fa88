// Gated feed-forwards, and mixtures of them.

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <vector>

#include "step.h"

namespace session_server {

namespace {

void leave_groups(const Experts& moe, std::vector<float>& ranks) {
    const long size = static_cast<long>(ranks.size()) / moe.n_group;
    const long counted = moe.is_sigmoid ? std::min(2l, size) : 1;
    std::vector<std::pair<float, long>> groups;
    for (long group = 0; group < moe.n_group; ++group) {
        std::vector<float> own(ranks.begin() + group * size, ranks.begin() + (group + 1) * size);
        std::partial_sort(own.begin(), own.begin() + counted, own.end(), std::greater<>());
        groups.emplace_back(std::accumulate(own.begin(), own.begin() + counted, 0.0f), -group);
    }
    std::sort(groups.begin(), groups.end(), std::greater<>());
    for (long i = moe.topk_group; i < moe.n_group; ++i) {
        const long group = -groups[i].second;
        std::fill(ranks.begin() + group * size, ranks.begin() + (group + 1) * size, -INFINITY);
    }
}

}  // namespace

void Step::feed(const Layer& layer, const GatedMlp& mlp) {
    prepare(layer.before_ffn, {mlp.gate_up.get()});
    linear(*mlp.gate_up, y_);
    convert_gated(mlp, num_tokens_);
    add_linear(*mlp.down, layer.after_ffn);
}

void Step::convert_gated(const GatedMlp& mlp, long num_tokens) {
    const long inner = mlp.down->inputs;
    convert(*mlp.down, num_tokens, inner, [&](long t, long first, long count, float* at) {
        const float* gate = y_ + t * 2 * inner + first;
        kernels_.gate(gate, gate + inner, count, mlp.rule, at);
        return at;
    });
}

void Step::feed(const Layer& layer, const Experts& moe) {
    const GatedMlp& any = moe.experts.front();
    const long chosen = moe.num_experts_per_tok, choices = num_tokens_ * chosen;
    const Packed* shared = moe.shared ? moe.shared->gate_up.get() : moe.router.get();
    prepare(layer.before_ffn, {moe.router.get(), any.gate_up.get(), shared});
    float* logits = memory_.routed.get(0);
    linear(*moe.router, logits);
    me_.share(num_tokens_, [&](long t) { choose(moe, logits + t * moe.router->outputs, t); });
    float* total = z_;
    if (moe.shared) {
        linear(*moe.shared->gate_up, y_);
        // The normed inputs are still needed: gate into y_ itself.
        const long inner = moe.shared->down->inputs;
        me_.share(num_tokens_, [&](long t) {
            float* gate = y_ + t * 2 * inner;
            kernels_.gate(gate, gate + inner, inner, moe.shared->rule, mixed_ + t * inner);
        });
    }
    me_.share(1, [&](long) { sort_choices(moe); });
    // Gather the inputs of every choice behind those of the tokens.
    const Inputs inputs = memory_.x.as(form_of(*any.gate_up));
    me_.share(choices, [&](long slot) {
        const long t = memory_.order[slot] / chosen;
        kernels_.convert(memory_.x.floats(t), size_, inputs, num_tokens_ + slot);
    });
    const long inner = any.down->inputs;
    float* gates = moe.shared ? y_ + num_tokens_ * 2 * moe.shared->down->inputs : y_;
    by_expert(moe, &GatedMlp::gate_up, inputs.from(num_tokens_), gates, 2 * inner);
    if (moe.shared) {
        const long size = moe.shared->down->inputs;
        convert(*moe.shared->down, num_tokens_, size, [&](long t, long first, long, float*) {
            return mixed_ + t * size + first;
        });
        linear(*moe.shared->down, total);
    }
    const Inputs activated = memory_.x.as(form_of(*any.down));
    me_.share(choices, [&](long slot) {
        const float* gate = gates + slot * 2 * inner;
        float* at = memory_.x.floats(slot);
        kernels_.gate(gate, gate + inner, inner, any.rule, at);
        kernels_.convert(at, inner, activated, slot);
    });
    float* outputs = gates;
    by_expert(moe, &GatedMlp::down, activated, outputs, size_);
    me_.share(num_tokens_, [&](long t) {
        float* sum = total + t * size_;
        if (!moe.shared) std::fill(sum, sum + size_, 0.0f);
        for (long i = 0; i < chosen; ++i) {
            const float weight = memory_.weights[t * chosen + i];
            const float* of_choice = outputs + memory_.slots_of_expert[t * chosen + i] * size_;
            for (long j = 0; j < size_; ++j) sum[j] += weight * of_choice[j];
        }
        if (layer.after_ffn.norm) return;
        float* to = hidden_ + t * size_;
        for (long j = 0; j < size_; ++j) to[j] += layer.after_ffn.factor * sum[j];
    });
    if (layer.after_ffn.norm) add_normed(layer.after_ffn);
}

void Step::by_expert(const Experts& moe, Linear GatedMlp::*which, const Inputs& inputs, float* y,
                     long ldy) {
    const Packed& any = *(moe.experts.front().*which);
    const long num_experts = static_cast<long>(moe.experts.size());
    const long tile = kernels_.tile_panels(any.format, 1);
    const long chunks = (any.panels() + tile - 1) / tile;
    me_.share(num_experts * chunks, [&](long item) {
        const long expert = item / chunks, first = item % chunks * tile;
        const long begin = memory_.first_of_expert[expert];
        const long count = memory_.first_of_expert[expert + 1] - begin;
        if (count == 0) return;
        const Packed& weights = *(moe.experts[expert].*which);
        kernels_.linear(weights, tile_of(me_, weights, first, tile), inputs.from(begin), count,
                        y + begin * ldy, ldy, {});
    });
}

void Step::choose(const Experts& moe, const float* logits, long t) {
    const long num = moe.router->outputs, chosen = moe.num_experts_per_tok;
    std::vector<float> scores(logits, logits + num);
    if (moe.is_sigmoid) {
        for (float& score : scores) score = 1.0f / (1.0f + std::exp(-score));
    } else {
        const float most = *std::max_element(scores.begin(), scores.end());
        float total = 0.0f;
        for (float& score : scores) total += score = std::exp(score - most);
        for (float& score : scores) score /= total;
    }
    std::vector<float> ranks = scores;
    const Floats& bias = moe.e_score_correction_bias;
    for (size_t i = 0; i < bias.size(); ++i) ranks[i] += bias[i];
    if (moe.topk_group < moe.n_group) leave_groups(moe, ranks);
    std::vector<long> ids(num);
    std::iota(ids.begin(), ids.end(), 0);
    const auto before = [&](long a, long b) {
        return ranks[a] > ranks[b] || (ranks[a] == ranks[b] && a < b);
    };
    std::partial_sort(ids.begin(), ids.begin() + chosen, ids.end(), before);
    std::sort(ids.begin(), ids.begin() + chosen);
    float total = 0.0f;
    for (long i = 0; i < chosen; ++i) total += scores[ids[i]];
    for (long i = 0; i < chosen; ++i) {
        float weight = scores[ids[i]];
        if (moe.norm_topk_prob) weight /= total;
        memory_.weights[t * chosen + i] = weight * moe.routed_scaling_factor;
        memory_.slots_of_expert[t * chosen + i] = ids[i];
    }
}

void Step::sort_choices(const Experts& moe) {
    const long num_experts = static_cast<long>(moe.experts.size());
    const long choices = num_tokens_ * moe.num_experts_per_tok;
    auto& first = memory_.first_of_expert;
    first.assign(num_experts + 1, 0);
    for (long i = 0; i < choices; ++i) ++first[memory_.slots_of_expert[i] + 1];
    std::partial_sum(first.begin(), first.end(), first.begin());
    std::vector<long> next(first.begin(), first.end() - 1);
    for (long i = 0; i < choices; ++i) {
        const long slot = next[memory_.slots_of_expert[i]]++;
        memory_.order[slot] = i;
        memory_.slots_of_expert[i] = slot;
    }
}

}  // namespace session_server
