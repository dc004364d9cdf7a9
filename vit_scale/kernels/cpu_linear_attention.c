/* Linear attention by positive random features (FAVOR+) in fp32 on a CPU; each thread processes one head of one image
   at a time. models/linear_attention.py has the formulas.

   The features of BLOCK tokens are computed, used and overwritten in the cache: none are in memory, and the backward
   pass computes them again. cpu_linear_attention.py calls it.

   Names: `directions` are the random features [features, width], already scaled; a row of features has `stride`
   numbers, full vectors, padded with zeros. Per head, the keys give `sums` [features, width], of feature times value,
   and `totals` [features], of features. `top` is the largest exponent of a key. */

#include "cpu_vectors.h"

/* The leading `queries` of the tokens attend to all. */
typedef struct {
    long queries, tokens, features, width, stride, row, y_row;
    float scale, epsilon;
} shape;

/* Pointers into the scratch memory of a thread. */
typedef struct {
    float *directions, *turned, *tokens, *values, *weights, *grads, *sums, *sums_turned, *grad_sums, *totals,
        *grad_totals, *mean;
} buffers;

static long scratch_numbers(shape s) {
    return 5 * s.stride * s.width + 2 * BLOCK * (s.width + s.stride) + 2 * s.stride + s.width;
}

static buffers lay_out(shape s, float *scratch) {
    const long matrix_size = s.stride * s.width;
    buffers b;
    b.directions = scratch, b.turned = b.directions + matrix_size, b.sums = b.turned + matrix_size;
    b.sums_turned = b.sums + matrix_size, b.grad_sums = b.sums_turned + matrix_size;
    b.tokens = b.grad_sums + matrix_size, b.values = b.tokens + BLOCK * s.width;
    b.weights = b.values + BLOCK * s.width, b.grads = b.weights + BLOCK * s.stride;
    b.totals = b.grads + BLOCK * s.stride, b.grad_totals = b.totals + s.stride, b.mean = b.grad_totals + s.stride;
    return b;
}

INLINE float dot(const float *a, const float *b, long count) {
    vector sum = {0};
    for (long j = 0; j < count; j += LANES) sum += LOAD(a + j) * LOAD(b + j);
    return sum_of(sum);
}

/* to += factor * from, for full vectors. */
INLINE void add_scaled(float factor, const float *from, float *to, long count) {
    for (long j = 0; j < count; j += LANES) STORE(to + j, LOAD(to + j) + LOAD(from + j) * factor);
}

/* Replace exponents by features: exponentials relative to `largest`, plus epsilon. */
INLINE void features_of(shape s, float *row, float largest, float epsilon) {
    for (long j = 0; j < s.stride; j += LANES)
        STORE(row + j,
              first_lanes(power_of_2((LOAD(row + j) - largest) * (float)M_LOG2E) + epsilon, s.features - j));
}

/* Exponents of a block of tokens: products with the directions. */
static void exponents(shape s, buffers b, const float *x, long rows) {
    copy_rows(x, s.row, b.tokens, s.width, rows, s.width);
    product(rows, s.stride, s.width, (matrix){b.tokens, s.width, 1}, (matrix){b.turned, s.stride, 1}, b.weights,
            s.stride, 0);
}

/* The same of keys, minus half their squared length. */
static void key_exponents(shape s, buffers b, const float *k, long rows) {
    exponents(s, b, k, rows);
    for (long r = 0; r < rows; r++) {
        const float half = dot(b.tokens + r * s.width, b.tokens + r * s.width, s.width) * s.scale / 2;
        for (long j = 0; j < s.stride; j += LANES)
            STORE(b.weights + r * s.stride + j, LOAD(b.weights + r * s.stride + j) - half);
    }
}

/* Sum features, and features times values, over the keys; return the largest exponent. A larger one than those before
   scales the sums down. */
static float sum_over_keys(shape s, buffers b, const float *k, const float *v) {
    float top = -INFINITY;
    memset(b.sums, 0, s.stride * s.width * sizeof(float));
    memset(b.totals, 0, s.stride * sizeof(float));
    memset(b.mean, 0, s.width * sizeof(float));
    for (long i = 0; i < s.tokens; i += BLOCK) {
        const long rows = s.tokens - i < BLOCK ? s.tokens - i : BLOCK;
        key_exponents(s, b, k + i * s.row, rows);
        copy_rows(v + i * s.row, s.row, b.values, s.width, rows, s.width);
        float largest = top;
        for (long r = 0; r < rows; r++) {
            const float most = largest_of(b.weights + r * s.stride, s.features);
            largest = most > largest ? most : largest;
        }
        if (largest > top && i > 0) {
            const float down = expf(top - largest);
            for (long j = 0; j < s.stride * s.width; j += LANES) STORE(b.sums + j, LOAD(b.sums + j) * down);
            for (long j = 0; j < s.stride; j += LANES) STORE(b.totals + j, LOAD(b.totals + j) * down);
        }
        top = largest;
        for (long r = 0; r < rows; r++) {
            features_of(s, b.weights + r * s.stride, top, 0);
            add_scaled(1, b.weights + r * s.stride, b.totals, s.stride);
            add_scaled(1, b.values + r * s.width, b.mean, s.width);
        }
        product(s.features, s.width, rows, (matrix){b.weights, 1, s.stride}, (matrix){b.values, s.width, 1}, b.sums,
                s.width, 1);
    }
    /* Epsilon in every feature of every key. */
    for (long m = 0; m < s.features; m++) {
        add_scaled(s.epsilon, b.mean, b.sums + m * s.width, s.width);
        b.totals[m] += s.epsilon * s.tokens;
    }
    return top;
}

static void forward_head(shape s, buffers b, const float *q, const float *k, const float *v, float *y) {
    sum_over_keys(s, b, k, v);
    for (long i = 0; i < s.queries; i += BLOCK) {
        const long rows = s.queries - i < BLOCK ? s.queries - i : BLOCK;
        float *out = y + i * s.y_row;
        exponents(s, b, q + i * s.row, rows);
        for (long r = 0; r < rows; r++) {
            float *row = b.weights + r * s.stride;
            features_of(s, row, largest_of(row, s.features), s.epsilon);
        }
        product(rows, s.width, s.features, (matrix){b.weights, s.stride, 1}, (matrix){b.sums, s.width, 1}, out,
                s.y_row, 0);
        for (long r = 0; r < rows; r++) {
            const float to_one = 1 / dot(b.weights + r * s.stride, b.totals, s.stride);
            for (long j = 0; j < s.width; j += LANES)
                STORE(out + r * s.y_row + j, LOAD(out + r * s.y_row + j) * to_one);
        }
    }
}

/* Gradients of queries, and of the sums over keys. */
static void backward_queries(shape s, buffers b, const float *grad_y, const float *q, const float *y, float *grad_q) {
    memset(b.grad_sums, 0, s.stride * s.width * sizeof(float));
    memset(b.grad_totals, 0, s.stride * sizeof(float));
    transpose(b.sums, s.width, b.sums_turned, s.stride, s.features, s.width);
    for (long i = 0; i < s.queries; i += BLOCK) {
        const long rows = s.queries - i < BLOCK ? s.queries - i : BLOCK;
        exponents(s, b, q + i * s.row, rows);
        copy_rows(grad_y + i * s.y_row, s.y_row, b.values, s.width, rows, s.width);
        float grad_total[BLOCK];
        for (long r = 0; r < rows; r++) {
            float *row = b.weights + r * s.stride, *grad = b.values + r * s.width;
            features_of(s, row, largest_of(row, s.features), s.epsilon);
            const float to_one = 1 / dot(row, b.totals, s.stride);
            grad_total[r] = -dot(grad, y + (i + r) * s.y_row, s.width) * to_one;
            for (long j = 0; j < s.width; j += LANES) STORE(grad + j, LOAD(grad + j) * to_one);
            add_scaled(grad_total[r], row, b.grad_totals, s.stride);
        }
        const matrix by_grad = {b.values, s.width, 1};
        product(s.features, s.width, rows, (matrix){b.weights, 1, s.stride}, by_grad, b.grad_sums, s.width, 1);
        product(rows, s.stride, s.width, by_grad, (matrix){b.sums_turned, s.stride, 1}, b.grads, s.stride, 0);
        for (long r = 0; r < rows; r++)
            for (long j = 0; j < s.stride; j += LANES) {
                float *grad = b.grads + r * s.stride + j;
                const vector whole = LOAD(grad) + LOAD(b.totals + j) * grad_total[r];
                const vector feature = LOAD(b.weights + r * s.stride + j) - s.epsilon;
                STORE(grad, first_lanes(whole * feature, s.features - j));
            }
        product(rows, s.width, s.features, (matrix){b.grads, s.stride, 1}, (matrix){b.directions, s.width, 1},
                grad_q + i * s.row, s.row, 0);
    }
    for (long i = s.queries; i < s.tokens; i++) memset(grad_q + i * s.row, 0, s.width * sizeof(float));
}

static void backward_keys(shape s, buffers b, float top, const float *k, const float *v, float *grad_k,
                          float *grad_v) {
    transpose(b.grad_sums, s.width, b.sums_turned, s.stride, s.features, s.width);
    for (long i = 0; i < s.tokens; i += BLOCK) {
        const long rows = s.tokens - i < BLOCK ? s.tokens - i : BLOCK;
        key_exponents(s, b, k + i * s.row, rows);
        copy_rows(v + i * s.row, s.row, b.values, s.width, rows, s.width);
        for (long r = 0; r < rows; r++) features_of(s, b.weights + r * s.stride, top, s.epsilon);
        product(rows, s.width, s.features, (matrix){b.weights, s.stride, 1}, (matrix){b.grad_sums, s.width, 1},
                grad_v + i * s.row, s.row, 0);
        product(rows, s.stride, s.width, (matrix){b.values, s.width, 1}, (matrix){b.sums_turned, s.stride, 1}, b.grads,
                s.stride, 0);
        float sums[BLOCK];
        for (long r = 0; r < rows; r++) {
            vector sum = {0};
            for (long j = 0; j < s.stride; j += LANES) {
                float *grad = b.grads + r * s.stride + j;
                const vector feature = LOAD(b.weights + r * s.stride + j) - s.epsilon;
                const vector g = first_lanes((LOAD(grad) + LOAD(b.grad_totals + j)) * feature, s.features - j);
                STORE(grad, g);
                sum += g;
            }
            sums[r] = sum_of(sum);
        }
        float *out = grad_k + i * s.row;
        product(rows, s.width, s.features, (matrix){b.grads, s.stride, 1}, (matrix){b.directions, s.width, 1}, out,
                s.row, 0);
        for (long r = 0; r < rows; r++)
            add_scaled(-sums[r] * s.scale, b.tokens + r * s.width, out + r * s.row, s.width);
    }
}

/* -------------------------------------------------------------------------------------------------------- calls */

static shape shape_of(long queries, long tokens, long features, long heads, long width, float epsilon) {
    const long dim = heads * width;
    return (shape){queries, tokens, features, width, (features + LANES - 1) / LANES * LANES, 3 * dim, dim,
                   1 / sqrtf(width), epsilon};
}

/* Return the scratch memory of a thread with the directions in it, scaled; NULL without memory. */
static float *prepare(shape s, const float *directions, buffers *b) {
    float *scratch = allocate(scratch_numbers(s));
    if (scratch == NULL) return NULL;
    *b = lay_out(s, scratch);
    const float factor = sqrtf(s.scale);
    for (long j = 0; j < s.features * s.width; j++) b->directions[j] = directions[j] * factor;
    transpose(b->directions, s.width, b->turned, s.stride, s.features, s.width);
    return scratch;
}

/* qkv is [images, tokens, 3, heads, width], y [images, queries, heads, width]; `width` must be a multiple of 16. Both
   return the number of threads that ran out of memory; if any, the result is invalid. */
int linear_attention_forward(const float *qkv, const float *directions, float *y, long features, float epsilon,
                             long images, long queries, long tokens, long heads, long width,
                             int threads) {
    const shape s = shape_of(queries, tokens, features, heads, width, epsilon);
    const long dim = heads * width;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        buffers b;
        float *scratch = prepare(s, directions, &b);
        failed += scratch == NULL;
#pragma omp for schedule(dynamic)
        for (long head = 0; head < images * heads; head++) {
            const long before = head / heads * tokens * dim, within = head % heads * width;
            const long out = head / heads * queries * dim + within;
            const float *q = qkv + 3 * before + within;
            if (scratch != NULL) forward_head(s, b, q, q + dim, q + 2 * dim, y + out);
        }
        free(scratch);
    }
    return failed;
}

int linear_attention_backward(const float *grad_y, const float *qkv, const float *directions, const float *y,
                              float *grad_qkv, long features, float epsilon, long images, long queries, long tokens,
                              long heads, long width, int threads) {
    const shape s = shape_of(queries, tokens, features, heads, width, epsilon);
    const long dim = heads * width;
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        buffers b;
        float *scratch = prepare(s, directions, &b);
        failed += scratch == NULL;
#pragma omp for schedule(dynamic)
        for (long head = 0; head < images * heads; head++) {
            const long before = head / heads * tokens * dim, within = head % heads * width;
            const long out = head / heads * queries * dim + within;
            const float *q = qkv + 3 * before + within;
            float *grad_q = grad_qkv + 3 * before + within;
            if (scratch != NULL) {
                const float top = sum_over_keys(s, b, q + dim, q + 2 * dim);
                backward_queries(s, b, grad_y + out, q, y + out, grad_q);
                backward_keys(s, b, top, q + dim, q + 2 * dim, grad_q + dim, grad_q + 2 * dim);
            }
        }
        free(scratch);
    }
    return failed;
}
