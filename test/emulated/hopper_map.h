// Tensor maps of the emulation: what cuTensorMapEncodeTiled is told stands in the map's own bytes, and boxes
// are found by it. It includes no header of CUDA, so that the driver's part and the kernels' share it.
#pragma once

#include <cstdint>
#include <cstring>

#include "hopper_layout.h"

namespace emulated {

struct TensorMap {
  static constexpr uint32_t SEAL = 0x4d617073;
  uint32_t seal;
  uint8_t rank, element_bytes, span, pad;
  uint8_t *data;
  uint64_t dims[5];
  uint64_t strides[4];  // bytes, of the second axis and on
  uint16_t box[5];
  uint8_t steps[5];

  uint32_t row_bytes() const { return box[0] * element_bytes; }
  uint32_t box_bytes() const {
    uint32_t bytes = element_bytes;
    for (int axis = 0; axis < rank; axis++) bytes *= box[axis];
    return bytes;
  }

  // Calls visit(offset, from) for every element of the box that begins at these coordinates: its offset in the
  // box as it lies unswizzled, and its place in memory, or NULL where it lies outside of the tensor.
  template <class Visit>
  void for_each_element(const int32_t *begin, Visit visit) const {
    uint32_t offset = 0, at[5] = {};
    for (;;) {
      bool inside = true;
      uint8_t *from = data;
      for (int axis = 0; axis < rank; axis++) {
        const int64_t place = int64_t(begin[axis]) + int64_t(at[axis]) * steps[axis];
        inside = inside && place >= 0 && uint64_t(place) < dims[axis];
        from += place * int64_t(axis ? strides[axis - 1] : element_bytes);
      }
      visit(offset, inside ? from : nullptr);
      offset += element_bytes;
      int axis = 0;
      while (axis < rank && ++at[axis] == box[axis]) at[axis++] = 0;
      if (axis == rank) return;
    }
  }

  // The same for stretches of a row, one after another, where elements are neighbours.
  template <class Visit>
  void for_each_chunk(const int32_t *begin, Visit visit) const {
    TensorMap rows = *this;
    const uint32_t a_chunk = 16 / element_bytes;
    if (steps[0] != 1 || box[0] % a_chunk || begin[0] < 0) {
      for_each_element(begin, [&](uint32_t offset, uint8_t *from) { visit(offset, from, element_bytes); });
      return;
    }
    rows.box[0] = 1;
    uint32_t row = 0;
    int32_t first[5];
    memcpy(first, begin, rank * sizeof *begin);
    first[0] = 0;
    rows.for_each_element(first, [&](uint32_t, uint8_t *from) {
      for (uint32_t i = 0; i < box[0]; i += a_chunk) {
        const uint64_t column = uint64_t(begin[0]) + i;
        const uint64_t there = column < dims[0] ? dims[0] - column : 0;
        const uint32_t wanted = from ? uint32_t(there < a_chunk ? there : a_chunk) : 0;
        const uint32_t offset = row * row_bytes() + i * element_bytes;
        if (wanted) visit(offset, from + column * element_bytes, wanted * element_bytes);
        if (wanted < a_chunk)
          visit(offset + wanted * element_bytes, nullptr, (a_chunk - wanted) * element_bytes);
      }
      row++;
    });
  }
};
static_assert(sizeof(TensorMap) <= 128, "it lies in a CUtensorMap");

}  // namespace emulated
