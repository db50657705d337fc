/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Brings the pages of a block that is claimed to where they belong, without the lock: from its slot
 * of the shadow, or from the device.
 */
#include <errno.h>
#include <string.h>

#include "far/blocks.h"

/* A read that fails as a whole is tried by pages so long before their bytes count as lost. */
#define LOST_NS 30000000000ull

#define A (&iswf_agent)

/* Moves every run of `pages`; returns those that were moved. */
struct iswf_mask iswf_move_runs(char *to, char *from, const struct iswf_mask *pages)
{
	struct iswf_mask moved = {{0}};
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run) {
		size_t at = (size_t)first * ISWF_PAGE_BYTES, bytes = 0;
		int code = A->ops->move(to + at, from + at, (size_t)run * ISWF_PAGE_BYTES, &bytes);
		uint32_t end = first + (uint32_t)(bytes / ISWF_PAGE_BYTES);
		struct iswf_mask part = iswf_mask_range(first, end);

		iswf_mask_add(&moved, &part);
		if (code != 0)
			break;
	}
	return moved;
}

/* Copies pages of the block's slot of the shadow to where the block's first page is at `to`. */
void iswf_copy_aside(uint32_t block, char *to, const struct iswf_mask *pages)
{
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run) {
		size_t at = (size_t)first * ISWF_PAGE_BYTES;

		(void)A->ops->copy(to + at, iswf_shadow_of(&A->blocks[block]) + at,
				   (size_t)run * ISWF_PAGE_BYTES);
	}
}

/* What lies aside goes back. A page that cannot be moved (never seen) is copied. */
void iswf_put_back(uint32_t block, const struct iswf_mask *aside)
{
	struct iswf_mask moved =
		iswf_move_runs(iswf_at(block), iswf_shadow_of(&A->blocks[block]), aside);
	struct iswf_mask rest = iswf_mask_without(aside, &moved);

	iswf_copy_aside(block, iswf_at(block), &rest);
}

struct arrival {
	uint32_t block, first, pages;
	const struct iswf_mask *wanted; /* of the block */
	char *to;                       /* where the block's first page is */
	char *cradle;                   /* NULL: pages are copied into the arena */
	int code;
};

/* Takes what came into the ring, while the slot is ours. */
static int take_arrival(void *ctx, const char *from)
{
	struct arrival *arrival = ctx;
	uint32_t run, end = arrival->first + arrival->pages;

	if (arrival->cradle != NULL) {
		memcpy(arrival->cradle + (size_t)arrival->first * ISWF_PAGE_BYTES, from,
		       (size_t)arrival->pages * ISWF_PAGE_BYTES);
		return 0;
	}
	for (uint32_t first = arrival->first;
	     (run = iswf_mask_run(arrival->wanted, &first)) != 0 && first < end; first += run) {
		int code;

		if (run > end - first)
			run = end - first;
		code = A->ops->copy(arrival->to + (size_t)first * ISWF_PAGE_BYTES,
				    from + (size_t)(first - arrival->first) * ISWF_PAGE_BYTES,
				    (size_t)run * ISWF_PAGE_BYTES);
		if (code != 0)
			return code;
	}
	return 0;
}

static int ask_pages(struct arrival *arrival)
{
	return A->ops->ask(ISWF_READ, arrival->block, arrival->first, arrival->pages, NULL,
			   take_arrival, arrival);
}

/* One by one, until each is there or lost for good. F5. */
static void ask_each(struct arrival *arrival)
{
	uint32_t first = arrival->first, end = first + arrival->pages;

	for (uint32_t page = first; page < end; page++) {
		uint64_t begin = iswf_now_ns();
		int code;

		if (!iswf_has(arrival->wanted, page))
			continue;
		arrival->first = page;
		arrival->pages = 1;
		do
			code = ask_pages(arrival);
		while (code != 0 && code != -ENODATA && code != -EPIPE &&
		       iswf_now_ns() - begin < LOST_NS);
		if (code != 0) {
			A->ops->poison(arrival->to + (size_t)page * ISWF_PAGE_BYTES,
				       ISWF_PAGE_BYTES);
			iswf_count(&A->count.pages_lost, 1);
		}
	}
}

/* Brings the far pages of `wanted` to the block whose first page is at `to`. */
void iswf_fetch(uint32_t block, char *to, const struct iswf_mask *wanted)
{
	struct arrival arrival = {.block = block, .to = to, .wanted = wanted};
	uint32_t first = 0, end = ISWF_BLOCK_PAGES;
	uint64_t begin = iswf_now_ns();

	while (first < end && !iswf_has(wanted, first))
		first++;
	while (end > first && !iswf_has(wanted, end - 1))
		end--;
	arrival.first = first;
	arrival.pages = end - first;
	if (ask_pages(&arrival) != 0)
		ask_each(&arrival);
	iswf_count(&A->count.fetches, 1);
	iswf_count(&A->count.pages_in, iswf_mask_count(wanted));
	iswf_count(&A->count.fetch_wait_ns, iswf_now_ns() - begin);
}

/* The same for all of a block that is nowhere else, as one page. False: by pages, then. */
bool iswf_fetch_whole(uint32_t block, const struct iswf_mask *far, char *cradle)
{
	struct arrival arrival = {
		.block = block,
		.pages = ISWF_BLOCK_PAGES,
		.wanted = far,
		.to = iswf_at(block),
		.cradle = cradle,
	};
	uint64_t begin = iswf_now_ns();
	size_t moved = 0;
	int code = ask_pages(&arrival);

	if (code == 0) {
		/* The device may have kept bytes of pages that are zeros by now. */
		for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
			if (!iswf_has(far, page))
				memset(cradle + (size_t)page * ISWF_PAGE_BYTES, 0, ISWF_PAGE_BYTES);
		code = A->ops->move(iswf_at(block), cradle, ISWF_BLOCK_BYTES, &moved);
	}
	if (code != 0 && moved != 0) /* never seen: what was moved is where it belongs */
		(void)A->ops->copy(iswf_at(block) + moved, cradle + moved,
				   ISWF_BLOCK_BYTES - moved);
	if (code != 0)
		A->ops->discard(cradle, ISWF_BLOCK_BYTES, false);
	iswf_count(&A->count.fetches, 1);
	iswf_count(&A->count.pages_in, iswf_mask_count(far));
	iswf_count(&A->count.fetch_wait_ns, iswf_now_ns() - begin);
	return code == 0 || moved != 0;
}
