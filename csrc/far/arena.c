/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which pages of the arena belong to which allocation. Free space is a sorted table of extents,
 * taken first fit. What was freed is zeros before it is free; so whatever is taken is zeros.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "far/agent.h"
#include "far/real.h"

#define EXTENTS_MAX (1u << 17)

struct extent {
	uint32_t first, pages;
};

static struct extent *extents;
static uint32_t extents_count, arena_pages;
static uint32_t *sizes; /* by first page */

#define A (&iswf_agent)

static void *table(size_t bytes)
{
	void *at = iswf_real()->mmap(NULL, bytes, PROT_READ | PROT_WRITE,
				     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return at == MAP_FAILED ? NULL : at;
}

int iswf_arena_init(uint64_t pages)
{
	arena_pages = (uint32_t)pages;
	extents = table(EXTENTS_MAX * sizeof(*extents));
	sizes = table(pages * sizeof(*sizes));
	if (extents == NULL || sizes == NULL)
		return -ENOMEM;
	extents[0] = (struct extent){0, arena_pages};
	extents_count = 1;
	return 0;
}

void iswf_arena_close(void)
{
	if (extents != NULL)
		iswf_real()->munmap(extents, EXTENTS_MAX * sizeof(*extents));
	if (sizes != NULL)
		iswf_real()->munmap(sizes, arena_pages * sizeof(*sizes));
	extents = NULL;
	sizes = NULL;
}

/* ------------------------------------------------------------ extents; lock held */

static void extent_remove(uint32_t i)
{
	memmove(extents + i, extents + i + 1, (extents_count - i - 1) * sizeof(*extents));
	extents_count--;
}

/* A full table loses addresses, never memory. */
static void extent_insert(uint32_t i, uint32_t first, uint32_t pages)
{
	if (extents_count == EXTENTS_MAX)
		return;
	memmove(extents + i + 1, extents + i, (extents_count - i) * sizeof(*extents));
	extents[i] = (struct extent){first, pages};
	extents_count++;
}

static uint32_t extent_after(uint32_t first)
{
	uint32_t low = 0, high = extents_count;

	while (low < high) {
		uint32_t middle = (low + high) / 2;

		if (extents[middle].first < first)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static void free_extent(uint32_t first, uint32_t pages)
{
	uint32_t i = extent_after(first);
	bool joins_before = i > 0 && extents[i - 1].first + extents[i - 1].pages == first;
	bool joins_after = i < extents_count && first + pages == extents[i].first;

	if (joins_before && joins_after) {
		extents[i - 1].pages += pages + extents[i].pages;
		extent_remove(i);
	} else if (joins_before) {
		extents[i - 1].pages += pages;
	} else if (joins_after) {
		extents[i].first = first;
		extents[i].pages += pages;
	} else {
		extent_insert(i, first, pages);
	}
}

static uint32_t aligned(uint32_t page, uint32_t align_pages)
{
	return (page + align_pages - 1) / align_pages * align_pages;
}

/* Takes pages [first, first + pages) out of extent i. */
static void carve(uint32_t i, uint32_t first, uint32_t pages)
{
	struct extent whole = extents[i];
	uint32_t head = first - whole.first, tail = whole.pages - head - pages;

	if (head != 0 && tail != 0) {
		extents[i].pages = head;
		extent_insert(i + 1, first + pages, tail);
	} else if (head != 0) {
		extents[i].pages = head;
	} else if (tail != 0) {
		extents[i] = (struct extent){first + pages, tail};
	} else {
		extent_remove(i);
	}
}

/* ------------------------------------------------------------ allocations; lock held */

static void live(uint32_t first, uint32_t pages, bool now)
{
	for (uint32_t page = first; page < first + pages;) {
		uint32_t block = page / ISWF_BLOCK_PAGES, from = page % ISWF_BLOCK_PAGES;
		uint32_t end = first + pages - block * ISWF_BLOCK_PAGES;
		struct iswf_mask mask;

		if (end > ISWF_BLOCK_PAGES)
			end = ISWF_BLOCK_PAGES;
		mask = iswf_mask_range(from, end);
		if (now)
			iswf_mask_add(&A->blocks[block].live, &mask);
		else
			iswf_discard(block, from, end, true);
		page = block * ISWF_BLOCK_PAGES + end;
	}
}

/* Frees pages of an allocation; addresses of blocks that are the kernel's are not used again. */
static void free_pages(uint32_t first, uint32_t pages)
{
	uint32_t from = first, end = first + pages;

	live(first, pages, false);
	for (uint32_t page = first; page < end;) {
		uint32_t block = page / ISWF_BLOCK_PAGES, stop = (block + 1) * ISWF_BLOCK_PAGES;

		if (stop > end)
			stop = end;
		if (A->blocks[block].fixed) {
			if (from < page)
				free_extent(from, page - from);
			from = stop;
		}
		page = stop;
	}
	if (from < end)
		free_extent(from, end - from);
}

static uint32_t page_of(const char *at)
{
	return (uint32_t)((at - A->arena) / ISWF_PAGE_BYTES);
}

static uint32_t pages_of(size_t bytes)
{
	return (uint32_t)((bytes + ISWF_PAGE_BYTES - 1) / ISWF_PAGE_BYTES);
}

char *iswf_take(size_t bytes, size_t align)
{
	uint32_t pages = pages_of(bytes), first = 0, i;
	uint32_t align_pages = align > ISWF_PAGE_BYTES ? (uint32_t)(align / ISWF_PAGE_BYTES) : 1;

	if (bytes > (uint64_t)arena_pages * ISWF_PAGE_BYTES)
		return NULL;
	/* Whole blocks of its own: what is freed together leaves together. */
	if (pages >= ISWF_BLOCK_PAGES && align_pages < ISWF_BLOCK_PAGES)
		align_pages = ISWF_BLOCK_PAGES;
	pthread_mutex_lock(&A->lock);
	for (i = iswf_rests() ? extents_count : 0; i < extents_count; i++) {
		first = aligned(extents[i].first, align_pages);
		if (first + pages <= extents[i].first + extents[i].pages)
			break;
	}
	if (i == extents_count) {
		pthread_mutex_unlock(&A->lock);
		return NULL;
	}
	carve(i, first, pages);
	sizes[first] = pages;
	live(first, pages, true);
	pthread_mutex_unlock(&A->lock);
	return A->arena + (uint64_t)first * ISWF_PAGE_BYTES;
}

uint32_t iswf_size_of(const char *at)
{
	return sizes[page_of(at)];
}

void iswf_give(char *at)
{
	uint32_t first = page_of(at), pages;

	pthread_mutex_lock(&A->lock);
	pages = sizes[first];
	sizes[first] = 0;
	if (pages != 0)
		free_pages(first, pages);
	pthread_mutex_unlock(&A->lock);
}

/* Lock held: whether the page belongs to an allocation. */
static bool is_live(uint32_t page)
{
	return iswf_has(&A->blocks[page / ISWF_BLOCK_PAGES].live, page % ISWF_BLOCK_PAGES);
}

/* Lock held: the first page of the allocation that this page is in. */
static uint32_t owner_of(uint32_t page)
{
	while (sizes[page] == 0)
		page--;
	return page;
}

void iswf_give_part(char *at, size_t bytes)
{
	uint32_t page = page_of(at), end = page + pages_of(bytes);

	pthread_mutex_lock(&A->lock);
	while (page < end) {
		uint32_t owner, owner_end, stop;

		if (!is_live(page)) {
			page++;
			continue;
		}
		/* What is left behind the part is an allocation of its own. */
		owner = owner_of(page);
		owner_end = owner + sizes[owner];
		stop = owner_end < end ? owner_end : end;
		if (stop < owner_end)
			sizes[stop] = owner_end - stop;
		sizes[owner] = page - owner;
		free_pages(page, stop - page);
		page = stop;
	}
	pthread_mutex_unlock(&A->lock);
}

bool iswf_resize(char *at, size_t bytes)
{
	uint32_t first = page_of(at), pages = pages_of(bytes), old, i;
	bool done = true;

	pthread_mutex_lock(&A->lock);
	old = sizes[first];
	if (pages < old) {
		sizes[first] = pages;
		free_pages(first + pages, old - pages);
	} else if (pages > old) {
		i = extent_after(first + old);
		done = !iswf_rests() && i < extents_count && extents[i].first == first + old &&
		       extents[i].pages >= pages - old;
		if (done) {
			carve(i, first + old, pages - old);
			sizes[first] = pages;
			live(first + old, pages - old, true);
		}
	}
	pthread_mutex_unlock(&A->lock);
	return done;
}
