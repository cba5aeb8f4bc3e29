// Convolutions whose product takes its rows from the image as they lie, with nothing gathered: lines of pixels at equal distances.
#pragma once

#include "core/conv/conv_call.h"

namespace octet {

// Whether convolve_image is faster than a product of gathered rows, for a convolution of one group to uint8.
bool serves_image(const ConvCall& call, const PackedGemm& gemm);
void convolve_image(const ConvCall& call, const PackedGemm& gemm);

}  // namespace octet
