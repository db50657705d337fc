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

static void fill(unsigned char *data, size_t bytes)
{
	uint32_t state = 1;

	for (size_t i = 0; i < bytes; i++) {
		state = state * 1664525u + 1013904223u;
		data[i] = (unsigned char)(state >> 24);
	}
}

TEST(test_table_agrees)
{
	static unsigned char data[4096 + 16];

	fill(data, sizeof(data));
	for (unsigned start = 0; start < 9; start++)
		for (unsigned bytes = 0; bytes < 70; bytes++)
			CHECK_EQ(iswi_crc32c(data + start, bytes),
				 iswi_crc32c_table(data + start, bytes));
	CHECK_EQ(iswi_crc32c(data, 4096), iswi_crc32c_table(data, 4096));
}

TEST(test_pages_at_once)
{
	static unsigned char data[11 * 4096];
	uint32_t crc[12];

	fill(data, sizeof(data));
	for (uint32_t pages = 0; pages <= 11; pages++) {
		memset(crc, 0, sizeof(crc));
		iswi_crc32c_pages(data, pages, crc);
		for (uint32_t i = 0; i < pages; i++)
			CHECK_EQ(crc[i], iswi_crc32c_table(data + i * 4096, 4096));
		CHECK_EQ(crc[pages], 0);
	}
}
