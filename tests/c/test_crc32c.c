// SPDX-License-Identifier: Apache-2.0
/* CRC-32C against published values, and the table against the CPU's instruction. */
#include <string.h>

#include "check.h"
#include "tests.h"
#include "util/util.h"

/* RFC 3720, B.4. */
TEST(test_published_values)
{
	unsigned char data[32];

	CHECK_EQ(iswi_crc32c("", 0), 0);
	CHECK_EQ(iswi_crc32c("123456789", 9), 0xe3069283u);
	memset(data, 0, sizeof(data));
	CHECK_EQ(iswi_crc32c(data, sizeof(data)), 0x8a9136aau);
	memset(data, 0xff, sizeof(data));
	CHECK_EQ(iswi_crc32c(data, sizeof(data)), 0x62a8ab43u);
	for (unsigned i = 0; i < sizeof(data); i++)
		data[i] = (unsigned char)i;
	CHECK_EQ(iswi_crc32c(data, sizeof(data)), 0x46dd794eu);
}

TEST(test_table_agrees)
{
	static unsigned char data[4096 + 16];
	uint32_t state = 1;

	for (unsigned i = 0; i < sizeof(data); i++) {
		state = state * 1664525u + 1013904223u;
		data[i] = (unsigned char)(state >> 24);
	}
	for (unsigned start = 0; start < 9; start++)
		for (unsigned bytes = 0; bytes < 70; bytes++)
			CHECK_EQ(iswi_crc32c(data + start, bytes),
				 iswi_crc32c_table(data + start, bytes));
	CHECK_EQ(iswi_crc32c(data, 4096), iswi_crc32c_table(data, 4096));
}

TEST(test_pages_at_once)
{
	static unsigned char data[11 * 4096];
	uint32_t crc[12], state = 7;

	for (unsigned i = 0; i < sizeof(data); i++) {
		state = state * 1664525u + 1013904223u;
		data[i] = (unsigned char)(state >> 24);
	}
	for (uint32_t pages = 0; pages <= 11; pages++) {
		memset(crc, 0, sizeof(crc));
		iswi_crc32c_pages(data, pages, crc);
		for (uint32_t i = 0; i < pages; i++)
			CHECK_EQ(crc[i], iswi_crc32c_table(data + i * 4096, 4096));
		CHECK_EQ(crc[pages], 0);
	}
}

TEST(test_one_bit_matters)
{
	static unsigned char page[4096];
	uint32_t crc = iswi_crc32c(page, sizeof(page));

	for (unsigned bit = 0; bit < 8 * sizeof(page); bit += 97) {
		page[bit / 8] ^= (unsigned char)(1u << (bit % 8));
		CHECK(iswi_crc32c(page, sizeof(page)) != crc);
		page[bit / 8] ^= (unsigned char)(1u << (bit % 8));
	}
}
