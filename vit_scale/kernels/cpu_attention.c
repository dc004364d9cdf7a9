/* Softmax attention in fp32 on a CPU, forward and backward; each thread processes one head of one image at a time.

   Hand-written because torch's CPU kernel, whose matmuls are MKL's, reaches 33% of the peak of an AMD EPYC with
   AVX-512 and 50% with AVX2 (benchmarks/attention_kernel.py). Here the keys and values of a head are contiguous in the
   cache, and matmuls accumulate in registers. setup.py builds it for both with gcc; cpu_attention.py calls it.

   Names: a head of an image has `tokens` queries, keys and values of `width` numbers. Scores are computed for
   BLOCK queries at a time, in rows of `stride` numbers: `tokens` rounded up to full vectors, padded with zeros.
   qkv is [images, tokens, 3, heads, width]; y is [images, tokens, heads, width]; log_sums is [images, heads, tokens].
   The order of every sum is independent of the number of threads and their timing. */

#include "cpu_vectors.h"

/* --------------------------------------------------------------------------------------------------------- heads */

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

/* `queries` of a head attend to `tokens` keys; between two of them lie `row` numbers, or `y_row` in y. */
typedef struct {
    long queries, tokens, width, stride, row, y_row;
    float scale;
} shape;

static long forward_scratch(shape s) { return s.width * s.stride + s.tokens * s.width + BLOCK * (s.width + s.stride); }

static void forward_head(shape s, const float *q, const float *k, const float *v, float *y, float *log_sums,
                         float *scratch) {
    float *keys = scratch, *values = keys + s.width * s.stride;
    float *queries = values + s.tokens * s.width, *scores = queries + BLOCK * s.width;
    transpose(k, s.row, keys, s.stride, s.tokens, s.width);
    copy_rows(v, s.row, values, s.width, s.tokens, s.width);
    for (long i = 0; i < s.queries; i += BLOCK) {
        const long rows = s.queries - i < BLOCK ? s.queries - i : BLOCK;
        float to_one[BLOCK];
        copy_rows(q + i * s.row, s.row, queries, s.width, rows, s.width);
        product(rows, s.stride, s.width, (matrix){queries, s.width, 1}, (matrix){keys, s.stride, 1}, scores, s.stride,
                0);
        for (long r = 0; r < rows; r++)
            log_sums[i + r] = exponentials(scores + r * s.stride, s.tokens, s.scale * (float)M_LOG2E, to_one + r);
        float *out = y + i * s.y_row;
        product(rows, s.width, s.tokens, (matrix){scores, s.stride, 1}, (matrix){values, s.width, 1}, out, s.y_row, 0);
        for (long r = 0; r < rows; r++)
            for (long j = 0; j < s.width; j++) out[r * s.y_row + j] *= to_one[r];
    }
}

static long backward_scratch(shape s) {
    return 2 * s.width * s.stride + 3 * s.tokens * s.width + 2 * BLOCK * (s.width + s.stride);
}

static void backward_head(shape s, const float *grad_y, const float *q, const float *k, const float *v, const float *y,
                          const float *log_sums, float *grad_q, float *grad_k, float *grad_v, float *scratch) {
    const long row = s.row, y_row = s.y_row, size = s.tokens * s.width;
    float *keys_turned = scratch, *values_turned = keys_turned + s.width * s.stride;
    float *keys = values_turned + s.width * s.stride, *grad_keys = keys + size, *grad_values = grad_keys + size;
    float *queries = grad_values + size, *grads = queries + BLOCK * s.width;
    float *weights = grads + BLOCK * s.width, *grad_scores = weights + BLOCK * s.stride;
    transpose(k, row, keys_turned, s.stride, s.tokens, s.width);
    transpose(v, row, values_turned, s.stride, s.tokens, s.width);
    copy_rows(k, row, keys, s.width, s.tokens, s.width);
    for (long i = 0; i < s.queries; i += BLOCK) {
        const long rows = s.queries - i < BLOCK ? s.queries - i : BLOCK;
        const matrix by_query = {queries, s.width, 1}, by_grad = {grads, s.width, 1};
        copy_rows(q + i * row, row, queries, s.width, rows, s.width);
        copy_rows(grad_y + i * y_row, y_row, grads, s.width, rows, s.width);
        product(rows, s.stride, s.width, by_query, (matrix){keys_turned, s.stride, 1}, weights, s.stride, 0);
        product(rows, s.stride, s.width, by_grad, (matrix){values_turned, s.stride, 1}, grad_scores, s.stride, 0);
        for (long r = 0; r < rows; r++) {
            vector delta = {0};
            for (long j = 0; j < s.width; j += LANES)
                delta += LOAD(grads + r * s.width + j) * LOAD(y + (i + r) * y_row + j);
            softmax_backward(weights + r * s.stride, grad_scores + r * s.stride, s.tokens, s.scale, log_sums[i + r],
                             sum_of(delta));
        }
        product(rows, s.width, s.tokens, (matrix){grad_scores, s.stride, 1}, (matrix){keys, s.width, 1},
                grad_q + i * row, row, 0);
        product(s.tokens, s.width, rows, (matrix){grad_scores, 1, s.stride}, by_query, grad_keys, s.width, i > 0);
        product(s.tokens, s.width, rows, (matrix){weights, 1, s.stride}, by_grad, grad_values, s.width, i > 0);
    }
    copy_rows(grad_keys, s.width, grad_k, row, s.tokens, s.width);
    copy_rows(grad_values, s.width, grad_v, row, s.tokens, s.width);
}

static shape shape_of(long queries, long tokens, long width, long row, long y_row) {
    return (shape){queries, tokens, width, (tokens + LANES - 1) / LANES * LANES, row, y_row, 1 / sqrtf(width)};
}

/* ------------------------------------------------------------------------------------------------------- groups */

/* The leading `prefix` tokens attend to all tokens. The others are in groups: those of group g are members[starts[g]]
   to members[starts[g + 1] - 1], and attend to the prefix and to each other. */
typedef struct {
    const int *members, *starts;
    long count, prefix, largest;
} groups;

static void gather(const float *from, long row, groups g, long group, int with_prefix, float *to, long width) {
    if (with_prefix) copy_rows(from, row, to, width, g.prefix, width), to += g.prefix * width;
    for (int i = g.starts[group]; i < g.starts[group + 1]; i++, to += width)
        memcpy(to, from + g.members[i] * row, width * sizeof(float));
}

static void scatter(const float *from, groups g, long group, float *to, long row, long width) {
    for (int i = g.starts[group]; i < g.starts[group + 1]; i++, from += width)
        memcpy(to + g.members[i] * row, from, width * sizeof(float));
}

static void add_rows(const float *from, float *to, long width) {
    for (long k = 0; k < width; k += LANES) STORE(to + k, LOAD(to + k) + LOAD(from + k));
}

static void scatter_added(const float *from, groups g, long group, float *to, long row, long width) {
    for (long i = 0; i < g.prefix; i++, from += width) add_rows(from, to + i * row, width);
    for (int i = g.starts[group]; i < g.starts[group + 1]; i++, from += width)
        add_rows(from, to + g.members[i] * row, width);
}

/* Queries, keys, values and results of a group, contiguous, and their gradients. */
static long group_numbers(shape all, groups g) {
    return 8 * (g.largest + g.prefix) * all.width + (g.largest + LANES - 1) / LANES * LANES;
}

static void forward_groups(shape all, groups g, const float *q, float *y, float *log_sums, float *scratch) {
    const long width = all.width, size = (g.largest + g.prefix) * width;
    const float *k = q + all.y_row, *v = k + all.y_row;
    float *own_q = scratch, *own_k = own_q + size, *own_v = own_k + size, *own_y = own_v + size, *sums = own_y + size;
    float *rest = scratch + group_numbers(all, g);
    if (g.prefix) forward_head(all, q, k, v, y, log_sums, rest);
    for (long i = 0; i < g.count; i++) {
        const long members = g.starts[i + 1] - g.starts[i];
        gather(q, all.row, g, i, 0, own_q, width);
        gather(k, all.row, g, i, 1, own_k, width);
        gather(v, all.row, g, i, 1, own_v, width);
        const shape s = shape_of(members, members + g.prefix, width, width, width);
        forward_head(s, own_q, own_k, own_v, own_y, sums, rest);
        scatter(own_y, g, i, y, all.y_row, width);
        scatter(sums, g, i, log_sums, 1, 1);
    }
}

static void backward_groups(shape all, groups g, const float *grad_y, const float *q, const float *y,
                            const float *log_sums, float *grad_q, float *scratch) {
    const long width = all.width, size = (g.largest + g.prefix) * width;
    const float *k = q + all.y_row, *v = k + all.y_row;
    float *grad_k = grad_q + all.y_row, *grad_v = grad_k + all.y_row;
    float *own_q = scratch, *own_k = own_q + size, *own_v = own_k + size, *own_y = own_v + size;
    float *own_grad_y = own_y + size, *own_grad_q = own_grad_y + size, *own_grad_k = own_grad_q + size;
    float *own_grad_v = own_grad_k + size, *sums = own_grad_v + size, *rest = scratch + group_numbers(all, g);
    if (g.prefix) backward_head(all, grad_y, q, k, v, y, log_sums, grad_q, grad_k, grad_v, rest);
    for (long i = 0; i < g.count; i++) {
        const long members = g.starts[i + 1] - g.starts[i];
        gather(q, all.row, g, i, 0, own_q, width);
        gather(k, all.row, g, i, 1, own_k, width);
        gather(v, all.row, g, i, 1, own_v, width);
        gather(y, all.y_row, g, i, 0, own_y, width);
        gather(grad_y, all.y_row, g, i, 0, own_grad_y, width);
        gather(log_sums, 1, g, i, 0, sums, 1);
        const shape s = shape_of(members, members + g.prefix, width, width, width);
        backward_head(s, own_grad_y, own_q, own_k, own_v, own_y, sums, own_grad_q, own_grad_k, own_grad_v, rest);
        scatter(own_grad_q, g, i, grad_q, all.row, width);
        if (g.prefix) { /* All keys already have the gradient from the prefix. */
            scatter_added(own_grad_k, g, i, grad_k, all.row, width);
            scatter_added(own_grad_v, g, i, grad_v, all.row, width);
        } else {
            scatter(own_grad_k, g, i, grad_k, all.row, width);
            scatter(own_grad_v, g, i, grad_v, all.row, width);
        }
    }
}

/* -------------------------------------------------------------------------------------------------------- calls */

/* `width` must be a multiple of 16. All return the number of threads that ran out of memory; if any, the result is
   invalid. */
int attention_forward(const float *qkv, float *y, float *log_sums, long images, long tokens, long heads, long width,
                      int threads) {
    const long dim = heads * width;
    const shape s = shape_of(tokens, tokens, width, 3 * dim, dim);
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        float *scratch = allocate(forward_scratch(s));
        failed += scratch == NULL;
#pragma omp for schedule(dynamic)
        for (long head = 0; head < images * heads; head++) {
            const long before = head / heads * tokens * dim, within = head % heads * width;
            const float *q = qkv + 3 * before + within;
            if (scratch != NULL)
                forward_head(s, q, q + dim, q + 2 * dim, y + before + within, log_sums + head * tokens, scratch);
        }
        free(scratch);
    }
    return failed;
}

int attention_backward(const float *grad_y, const float *qkv, const float *y, const float *log_sums, float *grad_qkv,
                       long images, long tokens, long heads, long width, int threads) {
    const long dim = heads * width;
    const shape s = shape_of(tokens, tokens, width, 3 * dim, dim);
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        float *scratch = allocate(backward_scratch(s));
        failed += scratch == NULL;
#pragma omp for schedule(dynamic)
        for (long head = 0; head < images * heads; head++) {
            const long before = head / heads * tokens * dim, within = head % heads * width;
            const float *q = qkv + 3 * before + within;
            float *grad_q = grad_qkv + 3 * before + within;
            if (scratch != NULL)
                backward_head(s, grad_y + before + within, q, q + dim, q + 2 * dim, y + before + within,
                              log_sums + head * tokens, grad_q, grad_q + dim, grad_q + 2 * dim, scratch);
        }
        free(scratch);
    }
    return failed;
}

INLINE long larger(long a, long b) { return a > b ? a : b; }

static groups groups_of(const int *members, const int *starts, long count, long prefix) {
    groups g = {members, starts, count, prefix, 0};
    for (long i = 0; i < count; i++) g.largest = larger(g.largest, starts[i + 1] - starts[i]);
    return g;
}

int grouped_attention_forward(const float *qkv, float *y, float *log_sums, const int *members, const int *starts,
                              long count, long prefix, long images, long tokens, long heads, long width, int threads) {
    const long dim = heads * width;
    const groups g = groups_of(members, starts, count, prefix);
    const shape all = shape_of(prefix, tokens, width, 3 * dim, dim);
    const shape largest = shape_of(g.largest, g.largest + prefix, width, width, width);
    const long numbers = larger(prefix ? forward_scratch(all) : 0, forward_scratch(largest));
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        float *scratch = allocate(group_numbers(all, g) + numbers);
        failed += scratch == NULL;
#pragma omp for schedule(dynamic)
        for (long head = 0; head < images * heads; head++) {
            const long before = head / heads * tokens * dim, within = head % heads * width;
            if (scratch != NULL)
                forward_groups(all, g, qkv + 3 * before + within, y + before + within, log_sums + head * tokens,
                               scratch);
        }
        free(scratch);
    }
    return failed;
}

int grouped_attention_backward(const float *grad_y, const float *qkv, const float *y, const float *log_sums,
                               float *grad_qkv, const int *members, const int *starts, long count, long prefix,
                               long images, long tokens, long heads, long width, int threads) {
    const long dim = heads * width;
    const groups g = groups_of(members, starts, count, prefix);
    const shape all = shape_of(prefix, tokens, width, 3 * dim, dim);
    const shape largest = shape_of(g.largest, g.largest + prefix, width, width, width);
    const long numbers = larger(prefix ? backward_scratch(all) : 0, backward_scratch(largest));
    int failed = 0;
#pragma omp parallel num_threads(threads) reduction(+ : failed)
    {
        float *scratch = allocate(group_numbers(all, g) + numbers);
        failed += scratch == NULL;
#pragma omp for schedule(dynamic)
        for (long head = 0; head < images * heads; head++) {
            const long before = head / heads * tokens * dim, within = head % heads * width;
            if (scratch != NULL)
                backward_groups(all, g, grad_y + before + within, qkv + 3 * before + within, y + before + within,
                                log_sums + head * tokens, grad_qkv + 3 * before + within, scratch);
        }
        free(scratch);
    }
    return failed;
}
