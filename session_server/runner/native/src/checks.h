// What must hold of a layer before a step computes with it.

#pragma once

#include "model.h"

namespace session_server {

// Check that the matrices of a layer, its norms and the pool it writes to fit each other and the
// decoder: steps read and write as many numbers as these say. Throws std::invalid_argument.
void check_layer(const Decoder& decoder, const Layer& layer);

}  // namespace session_server
