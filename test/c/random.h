/* Numbers that are the same on every machine for the same seed. */
#ifndef FA_TEST_RANDOM_H
#define FA_TEST_RANDOM_H

#include <math.h>
#include <stdint.h>

typedef struct fa_random {
  uint64_t state;
} fa_random;

/* SplitMix64 (Steele, Lea, Flood 2014): a counter put through a mixing function. */
static inline uint64_t random_bits(fa_random *random) {
  uint64_t z = random->state += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
  return z ^ z >> 31;
}

/* Streams of different numbers for different purposes. */
static inline fa_random random_stream(uint64_t seed, uint64_t stream) {
  fa_random random = {seed};
  random.state = random_bits(&random) + stream;
  random.state = random_bits(&random);
  return random;
}

/* In [0, 1). */
static inline double random_uniform(fa_random *random) { return (double)(random_bits(random) >> 11) * 0x1p-53; }

/* In [low, high]. */
static inline int64_t random_integer(fa_random *random, int64_t low, int64_t high) {
  return low + (int64_t)(random_bits(random) % (uint64_t)(high - low + 1));
}

/* Normal with mean 0 and variance 1 (Box and Muller 1958). */
static inline double random_normal(fa_random *random) {
  double radius = sqrt(-2 * log(1 - random_uniform(random)));
  return radius * cos(6.283185307179586 * random_uniform(random));
}

#endif
