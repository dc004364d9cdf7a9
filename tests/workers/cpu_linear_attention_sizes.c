/* Runs the linear attention kernel on arrays of exactly the size it is told, for a sanitizer to watch. */

#include <stdio.h>
#include KERNEL

/* Images, tokens, heads, width of a head, features, queries. */
static const long SHAPES[][6] = {
    {1, 1, 1, 16, 1, 1},   {2, 5, 2, 16, 40, 5},   {3, 17, 1, 48, 16, 1},  {2, 48, 3, 32, 33, 48},
    {1, 49, 2, 64, 266, 49}, {2, 65, 3, 64, 64, 2}, {1, 130, 2, 80, 31, 130}, {1, 96, 1, 112, 7, 96},
};

static float *numbers(long count) {
    float *all = malloc(count * sizeof(float));
    for (long i = 0; i < count; i++) all[i] = (float)(i * 7919 % 1000) / 500 - 1;
    return all;
}

int main(void) {
    const int count = sizeof SHAPES / sizeof SHAPES[0];
    for (int i = 0; i < count; i++) {
        const long images = SHAPES[i][0], tokens = SHAPES[i][1], heads = SHAPES[i][2], width = SHAPES[i][3];
        const long features = SHAPES[i][4], queries = SHAPES[i][5], dim = heads * width;
        float *qkv = numbers(3 * images * tokens * dim), *directions = numbers(features * width);
        float *y = numbers(images * queries * dim), *grad = numbers(images * queries * dim);
        float *grad_qkv = numbers(3 * images * tokens * dim);
        if (linear_attention_forward(qkv, directions, y, features, 1e-6f, images, queries, tokens, heads, width, 1))
            return 1;
        if (linear_attention_backward(grad, qkv, directions, y, grad_qkv, features, 1e-6f, images, queries, tokens,
                                      heads, width, 1))
            return 1;
        free(qkv), free(directions), free(y), free(grad), free(grad_qkv);
    }
    printf("all shapes\n");
    return 0;
}
