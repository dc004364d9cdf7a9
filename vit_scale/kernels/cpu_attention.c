/* Softmax attention in fp32 on a CPU, forward and backward; each thread processes one head of one image at a time.

   Hand-written because torch's CPU kernel, whose matmuls are MKL's, reaches 33% of the peak of an AMD EPYC with
   AVX-512 and 50% with AVX2 (benchmarks/cpu_attention.py). Here the keys and values of a head are contiguous in the
   cache, and matmuls accumulate in registers. setup.py builds it for both with gcc; cpu_attention.py calls it.

   Names: a head of an image has `tokens` queries, keys and values of `width` numbers. Scores are computed for
   BLOCK queries at a time, in rows of `stride` numbers: `tokens` rounded up to full vectors, padded with zeros.
   qkv is [images, tokens, 3, heads, width]; y is [images, tokens, heads, width]; log_sums is [images, heads, tokens].
   The order of every sum is independent of the number of threads and their timing. */

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
static void product(long rows, long columns, long depth, matrix a, matrix b, float *c, long c_row, int add) {
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

/* --------------------------------------------------------------------------------------------------------- heads */

static void copy_rows(const float *from, long from_row, float *to, long to_row, long rows, long width) {
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
static void transpose(const float *from, long from_row, float *to, long stride, long tokens, long width) {
    for (long j = 0; j < stride; j += LANES)
        for (long k = 0; k < width; k += LANES) {
            vector rows[LANES];
            for (int i = 0; i < LANES; i++)
                rows[i] = j + i < tokens ? LOAD(from + (j + i) * from_row + k) : (vector){0};
            turn(rows);
            for (int i = 0; i < LANES; i++) STORE(to + (k + i) * stride + j, rows[i]);
        }
}

/* Replace scores by 2^(factor * (score - largest)); return log2 of the sum of 2^(factor * score), and in `to_one` the
   factor that normalizes the results to a sum of one. */
INLINE float exponentials(float *row, long tokens, float factor, float *to_one) {
    float largest = largest_of(row, tokens);
    vector sum = {0};
    for (long j = 0; j < tokens; j += LANES) {
        vector p = first_lanes(power_of_2((LOAD(row + j) - largest) * factor), tokens - j);
        STORE(row + j, p);
        sum += p;
    }
    float total = sum_of(sum);
    *to_one = 1 / total;
    return largest * factor + log2f(total);
}

/* Replace scores by weights, and the gradients of weights by the gradients of scores. */
INLINE void softmax_backward(float *scores, float *grads, long tokens, float scale, float log_sum, float delta) {
    const float factor = scale * (float)M_LOG2E;
    for (long j = 0; j < tokens; j += LANES) {
        vector p = first_lanes(power_of_2(LOAD(scores + j) * factor - log_sum), tokens - j);
        STORE(grads + j, p * (LOAD(grads + j) - delta) * scale);
        STORE(scores + j, p);
    }
}

typedef struct {
    long tokens, heads, width, stride;
    float scale;
} shape;

static long forward_scratch(shape s) { return s.width * s.stride + s.tokens * s.width + BLOCK * (s.width + s.stride); }

static void forward_head(shape s, const float *q, float *y, float *log_sums, float *scratch) {
    const long row = 3 * s.heads * s.width, y_row = s.heads * s.width;
    float *keys = scratch, *values = keys + s.width * s.stride;
    float *queries = values + s.tokens * s.width, *scores = queries + BLOCK * s.width;
    transpose(q + y_row, row, keys, s.stride, s.tokens, s.width);
    copy_rows(q + 2 * y_row, row, values, s.width, s.tokens, s.width);
    for (long i = 0; i < s.tokens; i += BLOCK) {
        const long rows = s.tokens - i < BLOCK ? s.tokens - i : BLOCK;
        float to_one[BLOCK];
        copy_rows(q + i * row, row, queries, s.width, rows, s.width);
        product(rows, s.stride, s.width, (matrix){queries, s.width, 1}, (matrix){keys, s.stride, 1}, scores, s.stride,
                0);
        for (long r = 0; r < rows; r++)
            log_sums[i + r] = exponentials(scores + r * s.stride, s.tokens, s.scale * (float)M_LOG2E, to_one + r);
        float *out = y + i * y_row;
        product(rows, s.width, s.tokens, (matrix){scores, s.stride, 1}, (matrix){values, s.width, 1}, out, y_row, 0);
        for (long r = 0; r < rows; r++)
            for (long k = 0; k < s.width; k++) out[r * y_row + k] *= to_one[r];
    }
}

static long backward_scratch(shape s) {
    return 2 * s.width * s.stride + 3 * s.tokens * s.width + 2 * BLOCK * (s.width + s.stride);
}

static void backward_head(shape s, const float *grad_y, const float *q, const float *y, const float *log_sums,
                          float *grad_q, float *scratch) {
    const long row = 3 * s.heads * s.width, y_row = s.heads * s.width, size = s.tokens * s.width;
    float *keys_turned = scratch, *values_turned = keys_turned + s.width * s.stride;
    float *keys = values_turned + s.width * s.stride, *grad_keys = keys + size, *grad_values = grad_keys + size;
    float *queries = grad_values + size, *grads = queries + BLOCK * s.width;
    float *weights = grads + BLOCK * s.width, *grad_scores = weights + BLOCK * s.stride;
    transpose(q + y_row, row, keys_turned, s.stride, s.tokens, s.width);
    transpose(q + 2 * y_row, row, values_turned, s.stride, s.tokens, s.width);
    copy_rows(q + y_row, row, keys, s.width, s.tokens, s.width);
    for (long i = 0; i < s.tokens; i += BLOCK) {
        const long rows = s.tokens - i < BLOCK ? s.tokens - i : BLOCK;
        const matrix by_query = {queries, s.width, 1}, by_grad = {grads, s.width, 1};
        copy_rows(q + i * row, row, queries, s.width, rows, s.width);
        copy_rows(grad_y + i * y_row, y_row, grads, s.width, rows, s.width);
        product(rows, s.stride, s.width, by_query, (matrix){keys_turned, s.stride, 1}, weights, s.stride, 0);
        product(rows, s.stride, s.width, by_grad, (matrix){values_turned, s.stride, 1}, grad_scores, s.stride, 0);
        for (long r = 0; r < rows; r++) {
            vector delta = {0};
            for (long k = 0; k < s.width; k += LANES)
                delta += LOAD(grads + r * s.width + k) * LOAD(y + (i + r) * y_row + k);
            softmax_backward(weights + r * s.stride, grad_scores + r * s.stride, s.tokens, s.scale, log_sums[i + r],
                             sum_of(delta));
        }
        product(rows, s.width, s.tokens, (matrix){grad_scores, s.stride, 1}, (matrix){keys, s.width, 1},
                grad_q + i * row, row, 0);
        product(s.tokens, s.width, rows, (matrix){grad_scores, 1, s.stride}, by_query, grad_keys, s.width, i > 0);
        product(s.tokens, s.width, rows, (matrix){weights, 1, s.stride}, by_grad, grad_values, s.width, i > 0);
    }
    copy_rows(grad_keys, s.width, grad_q + y_row, row, s.tokens, s.width);
    copy_rows(grad_values, s.width, grad_q + 2 * y_row, row, s.tokens, s.width);
}

/* -------------------------------------------------------------------------------------------------------- calls */

static shape shape_of(long tokens, long heads, long width) {
    return (shape){tokens, heads, width, (tokens + LANES - 1) / LANES * LANES, 1 / sqrtf(width)};
}

static float *allocate(long numbers) {
    long bytes = numbers * (long)sizeof(float);
    return aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

/* `width` must be a multiple of 16. Both return the number of threads that ran out of memory; if any, the result is
   invalid. */
int attention_forward(const float *qkv, float *y, float *log_sums, long images, long tokens, long heads, long width,
                      int threads) {
    const shape s = shape_of(tokens, heads, width);
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        float *scratch = allocate(forward_scratch(s));
        failed += scratch == NULL;
#pragma omp for schedule(dynamic)
        for (long head = 0; head < images * heads; head++) {
            const long before = head / heads * tokens * heads * width, within = head % heads * width;
            if (scratch != NULL)
                forward_head(s, qkv + 3 * before + within, y + before + within, log_sums + head * tokens, scratch);
        }
        free(scratch);
    }
    return failed;
}

int attention_backward(const float *grad_y, const float *qkv, const float *y, const float *log_sums, float *grad_qkv,
                       long images, long tokens, long heads, long width, int threads) {
    const shape s = shape_of(tokens, heads, width);
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        float *scratch = allocate(backward_scratch(s));
        failed += scratch == NULL;
#pragma omp for schedule(dynamic)
        for (long head = 0; head < images * heads; head++) {
            const long before = head / heads * tokens * heads * width, within = head % heads * width;
            if (scratch != NULL)
                backward_head(s, grad_y + before + within, qkv + 3 * before + within, y + before + within,
                              log_sums + head * tokens, grad_qkv + 3 * before + within, scratch);
        }
        free(scratch);
    }
    return failed;
}
