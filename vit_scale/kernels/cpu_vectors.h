/* Matmuls and exponentials in fp32 on vectors of AVX2 or AVX-512; included by the kernels of this directory.
   Functions that a file does not use cost nothing. */

#pragma once

#include <math.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
enum { LANES = 16, VECTORS = 4 }; /* The sums of a tile use 24 of 32 registers, */
#else
enum { LANES = 8, VECTORS = 2 }; /* or 12 of 16. */
#endif
enum { ROWS = 6, BLOCK = 8 * ROWS, ALIGNMENT = 64 };

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int integers __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNUSED __attribute__((unused))
#define LOAD(p) (*(const vector *)(p))
#define STORE(p, value) (*(vector *)(p) = (value))

/* ------------------------------------------------------------------------------------------------------- matmuls */

/* A matrix whose element (i, j) is at[i * row + j * column]. */
typedef struct {
    const float *at;
    long row, column;
} matrix;

/* c = a b, or c += a b: a tile of `rows` rows and `vectors` vectors of columns, both compile-time constants. */
INLINE void tile(int rows, int vectors, long depth, matrix a, matrix b, float *c, long c_row, int add) {
    vector sums[ROWS][VECTORS];
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) sums[i][v] = add ? LOAD(c + i * c_row + v * LANES) : (vector){0};
    for (long k = 0; k < depth; k++) {
        vector b_k[VECTORS];
        for (int v = 0; v < vectors; v++) b_k[v] = LOAD(b.at + k * b.row + v * LANES);
        for (int i = 0; i < rows; i++) {
            float a_ik = a.at[i * a.row + k * a.column];
            for (int v = 0; v < vectors; v++) sums[i][v] += a_ik * b_k[v];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int v = 0; v < vectors; v++) STORE(c + i * c_row + v * LANES, sums[i][v]);
}

INLINE void tiles(int vectors, long rows, long depth, matrix a, matrix b, float *c, long c_row, int add) {
    for (long i = 0; i < rows; i += ROWS, a.at += ROWS * a.row, c += ROWS * c_row) {
        switch (rows - i) {
            case 1: tile(1, vectors, depth, a, b, c, c_row, add); break;
            case 2: tile(2, vectors, depth, a, b, c, c_row, add); break;
            case 3: tile(3, vectors, depth, a, b, c, c_row, add); break;
            case 4: tile(4, vectors, depth, a, b, c, c_row, add); break;
            case 5: tile(5, vectors, depth, a, b, c, c_row, add); break;
            default: tile(ROWS, vectors, depth, a, b, c, c_row, add);
        }
    }
}

/* c = a b, or c += a b, for [rows, depth] x [depth, columns]; columns are full vectors, contiguous in b and c. */
UNUSED static void product(long rows, long columns, long depth, matrix a, matrix b, float *c, long c_row, int add) {
    for (long j = 0; j < columns; j += VECTORS * LANES, b.at += VECTORS * LANES, c += VECTORS * LANES) {
        switch ((columns - j) / LANES) {
            case 1: tiles(1, rows, depth, a, b, c, c_row, add); break;
#ifdef __AVX512F__
            case 2: tiles(2, rows, depth, a, b, c, c_row, add); break;
            case 3: tiles(3, rows, depth, a, b, c, c_row, add); break;
#endif
            default: tiles(VECTORS, rows, depth, a, b, c, c_row, add);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------- vectors */

INLINE vector choose(integers where, vector x, vector otherwise) {
    return (vector)(((integers)x & where) | ((integers)otherwise & ~where));
}

/* 2^x for x <= 0: 2^n times a polynomial of the remainder of x, with a relative error of 2e-9. Results are clamped to
   2^-125 and, in case of rounding errors, to 1. NaN is preserved. */
INLINE vector power_of_2(vector x) {
    const float round_to_integer = 12582912.0f; /* 1.5 * 2^23: adding it to x rounds x to an integer. */
    x = choose(x < -125.0f, (vector){0} - 125.0f, choose(x > 0.0f, (vector){0}, x));
    vector shifted = x + round_to_integer;
    vector f = x - (shifted - round_to_integer);
    vector p = 0.000153707049f + (vector){0};
    p = p * f + 0.00133998482f;
    p = p * f + 0.00961837359f;
    p = p * f + 0.0555032901f;
    p = p * f + 0.240226477f;
    p = p * f + 0.693147182f;
    p = p * f + 1.0f;
    integers exponent = ((integers)shifted << 23) + 0x3f800000;
    return p * (vector)exponent;
}

/* Return the lanes before `count`, and zeros after them. */
INLINE vector first_lanes(vector x, long count) {
    if (count >= LANES) return x;
    integers lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    return choose(lane < (int)count, x, (vector){0});
}

INLINE float sum_of(vector x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

INLINE float largest_of(const float *row, long count) {
    float largest = row[0];
    long j = 0;
    if (count >= LANES) {
        vector most = LOAD(row);
        for (j = LANES; j + LANES <= count; j += LANES) most = choose(LOAD(row + j) > most, LOAD(row + j), most);
        for (int i = 0; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    }
    for (; j < count; j++) largest = row[j] > largest ? row[j] : largest;
    return largest;
}

/* -------------------------------------------------------------------------------------------------------- copies */

UNUSED static void copy_rows(const float *from, long from_row, float *to, long to_row, long rows, long width) {
    for (long i = 0; i < rows; i++) memcpy(to + i * to_row, from + i * from_row, width * sizeof(float));
}

/* Transpose LANES rows of LANES numbers in place: each round interleaves the two halves. */
INLINE void turn(vector rows[LANES]) {
    integers low, high;
    for (int i = 0; i < LANES; i++) {
        low[i] = i / 2 + (i % 2) * LANES;
        high[i] = low[i] + LANES / 2;
    }
    for (int round = 1; round < LANES; round *= 2) {
        vector dealt[LANES];
        for (int i = 0; i < LANES / 2; i++) {
            dealt[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], low);
            dealt[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], high);
        }
        memcpy(rows, dealt, sizeof dealt);
    }
}

/* to[k, j] = from[j, k], with zeros for j from `tokens` to `stride`. */
UNUSED static void transpose(const float *from, long from_row, float *to, long stride, long tokens, long width) {
    for (long j = 0; j < stride; j += LANES)
        for (long k = 0; k < width; k += LANES) {
            vector rows[LANES];
            for (int i = 0; i < LANES; i++)
                rows[i] = j + i < tokens ? LOAD(from + (j + i) * from_row + k) : (vector){0};
            turn(rows);
            for (int i = 0; i < LANES; i++) STORE(to + (k + i) * stride + j, rows[i]);
        }
}

UNUSED static float *allocate(long numbers) {
    long bytes = numbers * (long)sizeof(float);
    return aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}
