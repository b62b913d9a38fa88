// Compiled once for every instruction set, with SESSION_SERVER_ISA naming it.

#include "../kernels.h"
#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "recurrent.h"

namespace session_server {

namespace SESSION_SERVER_ISA {

namespace {
long panels_of(Format format, long num_tokens) {
    return tile_panels(format, static_cast<int>(std::min<long>(num_tokens, max_tokens(format))));
}
}  // namespace

extern const Kernels table;
#define SESSION_SERVER_TEXT(x) #x
#define SESSION_SERVER_NAME(x) SESSION_SERVER_TEXT(x)
const Kernels table = {
    .name = SESSION_SERVER_NAME(SESSION_SERVER_ISA),
    .input_form = input_form,
    .tile_panels = panels_of,
    .quad_bytes = kQuadBytes,
    .lane_queries = kLaneQueries,
    .convert = convert,
    .linear = linear,
    .rms_norm = rms_norm,
    .rotate = rotate,
    .gate = gate,
    .sigmoid_times = sigmoid_times,
    .store_kv = store_kv,
    .attend = attend,
    .argmax = argmax,
    .convolve = convolve,
    .silu = silu,
    .delta_rule = delta_rule,
    .state_space = state_space,
};

}  // namespace SESSION_SERVER_ISA

}  // namespace session_server
