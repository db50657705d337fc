/* SPDX-License-Identifier: Apache-2.0 */
/* The digest of pages: what differs anywhere has another one. */
#include <string.h>

#include "check.h"
#include "far/agent.h"
#include "tests.h"

static char page[ISWF_PAGE_BYTES] __attribute__((aligned(4096)));

static bool is_equal(struct iswf_digest a, struct iswf_digest b)
{
	return a.low == b.low && a.high == b.high;
}

TEST(every_bit_of_a_page_counts)
{
	struct iswf_digest zeros, bit;

	CHECK_EQ(iswf_digest_init(), 0);
	zeros = iswf_digest(page);
	for (uint32_t i = 0; i < ISWF_PAGE_BYTES * 8; i++) {
		page[i / 8] ^= (char)(1 << i % 8);
		bit = iswf_digest(page);
		CHECK(!is_equal(zeros, bit) && is_equal(bit, iswf_digest(page)));
		page[i / 8] = 0;
	}
	CHECK(is_equal(zeros, iswf_digest(page)));
}

TEST(the_place_of_a_word_counts)
{
	struct iswf_digest first;

	for (uint32_t from = 0; from < ISWF_PAGE_BYTES; from += 8) {
		uint32_t to = (from + 8) % ISWF_PAGE_BYTES;

		memset(page, 0, sizeof(page));
		page[from] = 1;
		first = iswf_digest(page);
		page[from] = 0;
		page[to] = 1;
		CHECK(!is_equal(first, iswf_digest(page)));
	}
}

/* Else who writes a program's data could choose two pages that pass for one. */
TEST(another_process_has_another_digest)
{
	struct iswf_digest before;

	memset(page, 1, sizeof(page));
	before = iswf_digest(page);
	CHECK_EQ(iswf_digest_init(), 0);
	CHECK(!is_equal(before, iswf_digest(page)));
}
