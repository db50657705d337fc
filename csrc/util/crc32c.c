// SPDX-License-Identifier: Apache-2.0
/*
 * CRC-32C, reflected, polynomial 0x82f63b78, initial value and final XOR all ones. The CPU's own
 * instruction where it has one (x86-64 SSE4.2), chosen at each call: asking is one load and test,
 * and needs no state of ours.
 */
#include "util/util.h"

#include <string.h>

/*
 * The CRC is linear, so the remainder of a byte is the XOR of the remainders of its bits, and the
 * table follows from eight numbers: the remainder of 0x80 is the polynomial, each lower bit is
 * one more shift.
 */
#define R0 0xf26b8303u
#define R1 0xe13b70f7u
#define R2 0xc79a971fu
#define R3 0x8ad958cfu
#define R4 0x105ec76fu
#define R5 0x20bd8edeu
#define R6 0x417b1dbcu
#define R7 0x82f63b78u

#define BIT(i, n) (((i) >> (n)) & 1u ? R##n : 0u)
#define ROW1(i)                                                                                    \
	(BIT(i, 0) ^ BIT(i, 1) ^ BIT(i, 2) ^ BIT(i, 3) ^ BIT(i, 4) ^ BIT(i, 5) ^ BIT(i, 6) ^       \
	 BIT(i, 7))
#define ROW4(i)  ROW1(i), ROW1(i + 1u), ROW1(i + 2u), ROW1(i + 3u)
#define ROW16(i) ROW4(i), ROW4(i + 4u), ROW4(i + 8u), ROW4(i + 12u)
#define ROW64(i) ROW16(i), ROW16(i + 16u), ROW16(i + 32u), ROW16(i + 48u)

static const uint32_t byte_remainder[256] = {ROW64(0u), ROW64(64u), ROW64(128u), ROW64(192u)};

static uint32_t update_table(uint32_t crc, const unsigned char *data, size_t bytes)
{
	while (bytes-- > 0)
		crc = byte_remainder[(crc ^ *data++) & 0xffu] ^ (crc >> 8);
	return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) static uint32_t
update_sse42(uint32_t crc, const unsigned char *data, size_t bytes)
{
	uint64_t wide = crc;
	uint64_t word;

	for (; bytes >= sizeof(word); bytes -= sizeof(word), data += sizeof(word)) {
		memcpy(&word, data, sizeof(word));
		wide = __builtin_ia32_crc32di(wide, word);
	}
	crc = (uint32_t)wide;
	for (; bytes > 0; bytes--)
		crc = __builtin_ia32_crc32qi(crc, *data++);
	return crc;
}

/* The instruction takes three cycles and may begin at each: four pages at once cost one's time. */
__attribute__((target("sse4.2"))) static void four_pages_sse42(const unsigned char *data,
							       uint32_t *crc_out)
{
	const size_t words = ISW_PAGE_BYTES / sizeof(uint64_t);
	uint64_t a = 0xffffffffu, b = a, c = a, d = a;
	uint64_t word[4];

	for (size_t i = 0; i < words; i++, data += sizeof(uint64_t)) {
		memcpy(&word[0], data, sizeof(uint64_t));
		memcpy(&word[1], data + ISW_PAGE_BYTES, sizeof(uint64_t));
		memcpy(&word[2], data + 2 * ISW_PAGE_BYTES, sizeof(uint64_t));
		memcpy(&word[3], data + 3 * ISW_PAGE_BYTES, sizeof(uint64_t));
		a = __builtin_ia32_crc32di(a, word[0]);
		b = __builtin_ia32_crc32di(b, word[1]);
		c = __builtin_ia32_crc32di(c, word[2]);
		d = __builtin_ia32_crc32di(d, word[3]);
	}
	crc_out[0] = ~(uint32_t)a;
	crc_out[1] = ~(uint32_t)b;
	crc_out[2] = ~(uint32_t)c;
	crc_out[3] = ~(uint32_t)d;
}
#endif

uint32_t iswi_crc32c_table(const void *data, size_t bytes)
{
	return ~update_table(0xffffffffu, data, bytes);
}

uint32_t iswi_crc32c(const void *data, size_t bytes)
{
#if defined(__x86_64__)
	if (__builtin_cpu_supports("sse4.2"))
		return ~update_sse42(0xffffffffu, data, bytes);
#endif
	return iswi_crc32c_table(data, bytes);
}

void iswi_crc32c_pages(const void *data, uint32_t pages, uint32_t *crc_out)
{
	const unsigned char *page = data;

#if defined(__x86_64__)
	if (__builtin_cpu_supports("sse4.2"))
		for (; pages >= 4; pages -= 4, page += 4 * ISW_PAGE_BYTES, crc_out += 4)
			four_pages_sse42(page, crc_out);
#endif
	for (; pages > 0; pages--, page += ISW_PAGE_BYTES)
		*crc_out++ = iswi_crc32c(page, ISW_PAGE_BYTES);
}
