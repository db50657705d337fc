/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages at home that the device has, too: whether it has the same bytes, and whether it still does.
 * The digest is made when a page leaves, since nobody waits for that; it holds when the page comes
 * back, as a page is opened with its seal.
 */
#include <sys/mman.h>

#include "far/blocks.h"
#include "far/real.h"

#define A (&iswf_agent)

static struct iswf_digest *digests_of(uint32_t block)
{
	return A->digests + (size_t)block * ISWF_BLOCK_PAGES;
}

struct iswf_mask iswf_know(uint32_t block, const struct iswf_mask *pages)
{
	const char *shadow = iswf_shadow_of(&A->blocks[block]);
	struct iswf_digest *left = digests_of(block);
	struct iswf_mask same = {{0}};
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run)
		for (uint32_t page = first; page < first + run; page++) {
			struct iswf_digest now =
				A->ops->digest(shadow + (size_t)page * ISWF_PAGE_BYTES);

			if (now.low == left[page].low && now.high == left[page].high)
				iswf_set(&same, page);
			left[page] = now;
		}
	return same;
}

bool iswf_are_confirmed(uint32_t block, const struct iswf_mask *pages)
{
	uint32_t first, end;

	iswf_mask_hull(pages, &first, &end);
	return A->ops->ask(ISWF_CONFIRM, block, first, end - first, NULL, NULL, NULL) == 0;
}

void iswf_end_digests(void)
{
	iswf_real()->munmap(A->digests, (size_t)atomic_load(&A->blocks_count) * ISWF_BLOCK_PAGES *
						sizeof(*A->digests));
	A->digests = NULL;
}

void iswf_forget_digests(uint32_t block)
{
	if (A->digests == NULL)
		return;
	(void)iswf_real()->madvise(digests_of(block), ISWF_BLOCK_PAGES * sizeof(*A->digests),
				   MADV_DONTNEED);
}
