/* ldmatrix, stmatrix and mma.sync. */
#include "internal.h"

#define WHOLE_WARP 0xffffffffu

static float e4m3_values[256], e5m2_values[256];

__attribute__((constructor)) static void fill_tables(void)
{
    for (u32 code = 0; code < 256; code++) {
        e4m3_values[code] = e4m3_value((u8)code);
        e5m2_values[code] = e5m2_value((u8)code);
    }
}

float element_value(Element type, u32 bits)
{
    switch (type) {
    case E4M3:
        return e4m3_values[bits & 0xff];
    case E5M2:
        return e5m2_values[bits & 0xff];
    case BF16:
        return bf16_value((u16)bits);
    default:
        return f16_value((u16)bits);
    }
}

/* An 8 x 8 matrix of 16-bit elements: lane l holds two adjacent elements of row l / 4, or of column l / 4. */
static void move_matrix(MatrixMove *const *lanes, int matrix)
{
    u8 *rows[8];
    for (int r = 0; r < 8; r++) {
        MatrixMove *owner = lanes[8 * matrix + r];
        rows[r] = shared_at(owner->thread, owner->address, 16, owner->store ? WRITE : READ);
    }
    for (int lane = 0; lane < (int)WARP; lane++) {
        u32 *word = &lanes[lane]->registers[matrix];
        for (int half = 0; half < 2; half++) {
            int inner = 2 * (lane % 4) + half;
            u8 *element = lanes[0]->transpose ? rows[inner] + 2 * (lane / 4) : rows[lane / 4] + 2 * inner;
            u16 bits;
            if (lanes[0]->store) {
                bits = (u16)(*word >> (16 * half));
                memcpy(element, &bits, sizeof bits);
            } else {
                memcpy(&bits, element, sizeof bits);
                *word = half ? (*word & 0xffff) | (u32)bits << 16 : bits;
            }
        }
    }
}

static void move_matrices(Warp *warp, u32 mask, void **arguments)
{
    (void)warp;
    (void)mask;
    MatrixMove *const *lanes = (MatrixMove **)arguments;
    for (int matrix = 0; matrix < lanes[0]->count; matrix++)
        move_matrix(lanes, matrix);
}

void rt_move_matrices(Thread *t, MatrixMove *move)
{
    move->thread = t;
    meet(t, WHOLE_WARP, move, move_matrices);
}

/* A guess at the FP8 tensor cores of Hopper, not compared with hardware: products and accumulator are aligned to the
 * largest exponent and truncated to 13 bits after the point. */
static float accumulate_hopper(float c, const float *a, const float *b, int k)
{
    const int fraction_bits = 13;
    float exact = c;
    int largest = INT32_MIN;
    for (int i = -1; i < k; i++) {
        double term = i < 0 ? c : (double)a[i] * b[i];
        int exponent;
        frexp(term, &exponent);
        if (term != 0 && exponent > largest)
            largest = exponent;
        if (i >= 0)
            exact += a[i] * b[i];
    }
    if (largest == INT32_MIN || !isfinite(exact))
        return exact;
    double scale = ldexp(1.0, fraction_bits + 1 - largest);
    double sum = trunc(c * scale);
    for (int i = 0; i < k; i++)
        sum += trunc((double)a[i] * b[i] * scale);
    return (float)(sum / scale);
}

/* c + a . b. In float32, the products are summed first. */
float multiply_accumulate(const Launch *launch, Element type, float c, const float *a, const float *b, int k)
{
    if (launch->accumulation && (type == E4M3 || type == E5M2))
        return accumulate_hopper(c, a, b, k);
    float sum = 0;
    for (int i = 0; i < k; i++)
        sum += a[i] * b[i];
    return c + sum;
}

/* Lane l's fragment of a 16 x k matrix A: four registers, of rows l / 4 and l / 4 + 8, left half and right half. */
void unpack_a(const u32 *registers, int lane, Element type, float *rows, int k)
{
    int per_register = k / 8;
    int bits = 32 / per_register;
    for (int r = 0; r < 4; r++) {
        int row = lane / 4 + 8 * (r & 1);
        int column = lane % 4 * per_register + (r >> 1) * k / 2;
        for (int i = 0; i < per_register; i++)
            rows[row * k + column + i] = element_value(type, registers[r] >> (bits * i));
    }
}

static void unpack_b(const u32 *registers, int lane, Element type, float *columns, int k)
{
    int per_register = k / 8;
    int bits = 32 / per_register;
    for (int r = 0; r < 2; r++) {
        int row = lane % 4 * per_register + r * k / 2;
        for (int i = 0; i < per_register; i++)
            columns[lane / 4 * k + row + i] = element_value(type, registers[r] >> (bits * i));
    }
}

static void multiply(Warp *warp, u32 mask, void **arguments)
{
    (void)mask;
    Mma *const *lanes = (Mma **)arguments;
    const Launch *launch = warp->block->cluster->launch;
    int k = lanes[0]->a_type == E4M3 || lanes[0]->a_type == E5M2 ? 32 : 16;
    float a[16 * 32], b[8 * 32];
    for (int lane = 0; lane < (int)WARP; lane++) {
        unpack_a(lanes[lane]->a, lane, lanes[0]->a_type, a, k);
        unpack_b(lanes[lane]->b, lane, lanes[0]->b_type, b, k);
    }
    for (int lane = 0; lane < (int)WARP; lane++) {
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + 8 * (i >> 1);
            int column = 2 * (lane % 4) + (i & 1);
            float c = lanes[lane]->c[i];
            lanes[lane]->d[i] = multiply_accumulate(launch, lanes[0]->a_type, c, a + row * k, b + column * k, k);
        }
    }
}

void rt_mma(Thread *t, Mma *mma)
{
    meet(t, WHOLE_WARP, mma, multiply);
}
