/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which pages of the arena belong to which allocation. Free space is a sorted table of extents,
 * taken first fit. What free() gives back stays as it is while there is room, so that the next
 * allocation there costs no fault; what must be zeros is made so when it is taken. A page that is
 * the kernel's (`hole`) is never free again, whoever has mapped what there.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "far/blocks.h"
#include "far/real.h"

#define EXTENTS_MAX (1u << 17)
/* Another allocator may give its own pointers to what begins there: they are not ours to free. */
#define MAPPED (1u << 31)

struct extent {
	uint32_t first, pages;
};

static struct extent *extents;
static uint32_t extents_count, arena_pages;
static uint32_t *sizes; /* by first page, in pages; of a mapping with MAPPED */

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

/* Takes pages [first, end) out of what is free. */
static void extents_withdraw(uint32_t first, uint32_t end)
{
	uint32_t i = extent_after(first);

	if (i > 0)
		i--;
	while (i < extents_count && extents[i].first < end) {
		uint32_t from = extents[i].first, to = from + extents[i].pages;

		if (from < first)
			from = first;
		if (to > end)
			to = end;
		if (from >= to) {
			i++;
			continue;
		}
		carve(i, from, to - from);
		i = extent_after(from);
	}
}

/* ------------------------------------------------------------ allocations; lock held */

static bool is_hole(uint32_t page)
{
	return iswf_has(&A->blocks[page / ISWF_BLOCK_PAGES].hole, page % ISWF_BLOCK_PAGES);
}

static bool is_live(uint32_t page)
{
	return iswf_has(&A->blocks[page / ISWF_BLOCK_PAGES].live, page % ISWF_BLOCK_PAGES);
}

/* How far pages from `page` on are likewise holes and likewise live, below `end`. */
static uint32_t end_of_kind(uint32_t page, uint32_t end)
{
	bool hole = is_hole(page), live = is_live(page);

	while (++page < end && is_hole(page) == hole && is_live(page) == live)
		;
	return page;
}

/* Calls for the part of pages [first, end) in each block; the first error. */
static int in_blocks(uint32_t first, uint32_t end,
		     int (*call)(uint32_t block, uint32_t from, uint32_t to))
{
	int code = 0;

	for (uint32_t page = first; page < end;) {
		uint32_t block = page / ISWF_BLOCK_PAGES, base = block * ISWF_BLOCK_PAGES;
		uint32_t stop = end - base < ISWF_BLOCK_PAGES ? end - base : ISWF_BLOCK_PAGES;
		int result = call(block, page - base, stop);

		if (code == 0)
			code = result;
		page = base + stop;
	}
	return code;
}

static int become_live(uint32_t block, uint32_t first, uint32_t end)
{
	struct iswf_mask mask = iswf_mask_range(first, end);

	if (block >= A->blocks_used)
		A->blocks_used = block + 1;
	iswf_mask_add(&A->blocks[block].live, &mask);
	if (!A->blocks[block].claimed) /* else its release does */
		iswf_sort(block);
	return 0;
}

static int become_mapped(uint32_t block, uint32_t first, uint32_t end)
{
	(void)first, (void)end;
	iswf_claim(block)->mapped = true; /* no table is given up there from now on */
	iswf_release(block);
	return 0;
}

static int die(uint32_t block, uint32_t first, uint32_t end)
{
	return iswf_discard(block, first, end, ISWF_DEAD);
}

static int become_free(uint32_t block, uint32_t first, uint32_t end)
{
	return iswf_discard(block, first, end, ISWF_FREED);
}

static int discard(uint32_t block, uint32_t first, uint32_t end)
{
	return iswf_discard(block, first, end, ISWF_ZEROS);
}

/*
 * What was freed there is discarded, wherever it is by now: the pages are live already, so they may
 * have left meanwhile, or be the kernel's.
 */
static int become_zeros(uint32_t block, uint32_t first, uint32_t end)
{
	const struct iswf_block *b = &A->blocks[block];
	struct iswf_mask pages = iswf_mask_range(first, end), held = b->home;

	iswf_mask_add(&held, &b->aside);
	iswf_mask_add(&held, &b->far);
	held = iswf_mask_and(&held, &pages);
	if (!iswf_mask_any(&held) && !b->fixed && !iswf_is_unsure(b))
		return 0;
	return discard(block, first, end);
}

static int be_home(uint32_t block, uint32_t first, uint32_t end)
{
	struct iswf_mask pages = iswf_mask_range(first, end);

	iswf_may_be_home(&A->blocks[block], &pages);
	if (!A->blocks[block].claimed) /* else its release does */
		iswf_sort(block);
	return 0;
}

static int lose(uint32_t block, uint32_t first, uint32_t end)
{
	iswf_lose(block, first, end);
	return 0;
}

/* Pages of an allocation that has been forgotten. */
static void free_pages(uint32_t first, uint32_t end, bool is_mapping)
{
	(void)in_blocks(first, end, is_mapping ? die : become_free);
	for (uint32_t page = first, stop; page < end; page = stop) {
		stop = end_of_kind(page, end);
		if (!is_hole(page))
			free_extent(page, stop - page);
	}
}

/* False: the kernel refuses (they are locked, say), and they are not given again. */
static bool clear_pages(uint32_t first, uint32_t end)
{
	if (in_blocks(first, end, become_zeros) == 0)
		return true;
	free_pages(first, end, true);
	return false;
}

/* Pages of an allocation that is being made. False: as clear_pages(). */
static bool make_live(uint32_t first, uint32_t end, enum iswf_request request)
{
	(void)in_blocks(first, end, become_live);
	if (request == ISWF_MAPPING)
		(void)in_blocks(first, end, become_mapped);
	if (request != ISWF_MALLOC && !clear_pages(first, end))
		return false;
	if (!A->watched)
		(void)in_blocks(first, end, be_home);
	return true;
}

static uint32_t page_of(const char *at)
{
	return (uint32_t)((at - A->arena) / ISWF_PAGE_BYTES);
}

static char *at_page(uint32_t page)
{
	return A->arena + (uint64_t)page * ISWF_PAGE_BYTES;
}

/* More than there are: it does not matter how many more. */
static uint32_t pages_of(size_t bytes)
{
	size_t pages = bytes / ISWF_PAGE_BYTES + (bytes % ISWF_PAGE_BYTES != 0);

	return pages > arena_pages ? arena_pages + 1 : (uint32_t)pages;
}

static uint32_t end_of(uint32_t first)
{
	return first + (sizes[first] & ~MAPPED);
}

/* The first page of the allocation that this page is in; ISWF_NONE. */
static uint32_t owner_of(uint32_t page)
{
	uint32_t owner = page;

	while (owner > 0 && sizes[owner] == 0)
		owner--;
	return end_of(owner) > page ? owner : ISWF_NONE;
}

/* Pages [first, end) belong to no allocation; what is left behind them is one of its own. */
static void forget(uint32_t first, uint32_t end)
{
	uint32_t owner = owner_of(first), behind = 0, mapped = 0;

	if (owner != ISWF_NONE && owner < first) {
		behind = end_of(owner);
		mapped = sizes[owner] & MAPPED;
		sizes[owner] = (first - owner) | mapped;
	}
	for (uint32_t page = first; page < end; page++) {
		if (sizes[page] == 0)
			continue;
		behind = end_of(page);
		mapped = sizes[page] & MAPPED;
		sizes[page] = 0;
	}
	if (behind > end)
		sizes[end] = (behind - end) | mapped;
}

/* ------------------------------------------------------------ allocations */

char *iswf_take(size_t bytes, size_t align, enum iswf_request request)
{
	uint32_t pages = pages_of(bytes), first = 0, i;
	uint32_t align_pages = align > ISWF_PAGE_BYTES ? (uint32_t)(align / ISWF_PAGE_BYTES) : 1;
	bool done;

	if (pages == 0 || pages > arena_pages)
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
	sizes[first] = pages | (request == ISWF_MAPPING ? MAPPED : 0);
	done = make_live(first, first + pages, request);
	if (!done)
		sizes[first] = 0;
	pthread_mutex_unlock(&A->lock);
	return done ? at_page(first) : NULL;
}

/* Else it is just being freed or given up, and in none yet. */
static bool is_in_one_extent(uint32_t first, uint32_t end)
{
	uint32_t i = extent_after(first + 1);

	return i > 0 && extents[i - 1].first + extents[i - 1].pages >= end;
}

bool iswf_give_up_stale(void)
{
	uint32_t block, first, end;
	bool given = false;

	pthread_mutex_lock(&A->lock);
	if (!A->watched && iswf_is_stale()) {
		block = A->queues[ISWF_Q_FREED].head;
		first = block * ISWF_BLOCK_PAGES;
		end = first + ISWF_BLOCK_PAGES;
		given = is_in_one_extent(first, end);
		if (given) {
			extents_withdraw(first, end);
			free_pages(first, end, true);
		} else {
			iswf_queue_add(ISWF_Q_FREED, block); /* later */
			A->blocks[block].queued_ms = iswf_now_ms();
		}
	}
	pthread_mutex_unlock(&A->lock);
	return given;
}

/* With MAPPED; 0: none begins there. */
static uint32_t size_at(const void *at)
{
	if (!iswf_is_ours(at) || (uintptr_t)at % ISWF_PAGE_BYTES != 0)
		return 0;
	return sizes[page_of(at)];
}

uint32_t iswf_size_of(const void *at)
{
	uint32_t size = size_at(at);

	return size & MAPPED ? 0 : size;
}

uint32_t iswf_size_of_mapping(const void *at)
{
	uint32_t size = size_at(at);

	return size & MAPPED ? size & ~MAPPED : 0;
}

void iswf_give(char *at)
{
	uint32_t first = page_of(at), pages;

	pthread_mutex_lock(&A->lock);
	pages = sizes[first];
	sizes[first] = 0;
	free_pages(first, first + pages, false);
	pthread_mutex_unlock(&A->lock);
}

bool iswf_resize(char *at, size_t bytes)
{
	uint32_t first = page_of(at), pages = pages_of(bytes), mapped, old, i;
	bool done = true;

	pthread_mutex_lock(&A->lock);
	mapped = sizes[first] & MAPPED;
	old = sizes[first] & ~MAPPED;
	if (pages < old) {
		sizes[first] = pages | mapped;
		free_pages(first + pages, first + old, mapped != 0);
	} else if (pages > old) {
		i = extent_after(first + old);
		done = !iswf_rests() && i < extents_count && extents[i].first == first + old &&
		       extents[i].pages >= pages - old;
		if (done) {
			carve(i, first + old, pages - old);
			sizes[first] = pages | mapped;
			done = make_live(first + old, first + pages,
					 mapped != 0 ? ISWF_MAPPING : ISWF_MALLOC);
			if (!done)
				sizes[first] = old | mapped;
		}
	}
	pthread_mutex_unlock(&A->lock);
	return done;
}

/* ------------------------------------------------------------ parts of the arena */

/* The kernel's part of a range, which belongs to it: without the lock. */
static int ask_kernel(uint32_t page, uint32_t end, int advice)
{
	size_t bytes = (size_t)(end - page) * ISWF_PAGE_BYTES;
	int code;

	pthread_mutex_unlock(&A->lock);
	code = advice < 0 ? A->ops->unmap(at_page(page), bytes)
			  : A->ops->advise(at_page(page), bytes, advice);
	pthread_mutex_lock(&A->lock);
	return code;
}

int iswf_unmap(char *at, size_t bytes)
{
	uint32_t first = page_of(at), end = first + pages_of(bytes);
	int code = 0;

	pthread_mutex_lock(&A->lock);
	forget(first, end);
	for (uint32_t page = first, stop; page < end && code == 0; page = stop) {
		stop = end_of_kind(page, end);
		if (is_hole(page))
			code = ask_kernel(page, stop, -1);
		else if (is_live(page))
			free_pages(page, stop, true);
	}
	pthread_mutex_unlock(&A->lock);
	return code;
}

int iswf_advise(char *at, size_t bytes, int advice)
{
	uint32_t first = page_of(at), end = first + pages_of(bytes);
	int code = 0;

	pthread_mutex_lock(&A->lock);
	for (uint32_t page = first, stop; page < end; page = stop) {
		int result = 0;

		stop = end_of_kind(page, end);
		if (is_hole(page))
			result = ask_kernel(page, stop, advice);
		else if (is_live(page))
			result = in_blocks(page, stop, discard);
		if (code == 0)
			code = result;
	}
	pthread_mutex_unlock(&A->lock);
	return code;
}

/* Lock held. */
static void surrender(uint32_t first, uint32_t end, enum iswf_why why)
{
	extents_withdraw(first, end);
	iswf_hand_back(first / ISWF_BLOCK_PAGES, (end - 1) / ISWF_BLOCK_PAGES + 1, true, why);
}

void iswf_surrender(char *at, size_t bytes, enum iswf_why why)
{
	uint32_t first = page_of(at), end = first + pages_of(bytes);

	pthread_mutex_lock(&A->lock);
	surrender(first, end, why);
	pthread_mutex_unlock(&A->lock);
}

void iswf_lay_over(char *at, size_t bytes, enum iswf_why why)
{
	uint32_t first = page_of(at), end = first + pages_of(bytes);

	pthread_mutex_lock(&A->lock);
	surrender(first, end, why);
	(void)in_blocks(first, end, lose);
	extents_withdraw(first, end); /* it may just have been given up */
	if (why == ISWF_WHY_MOVED)    /* else it is freed as one, with what lies over it */
		forget(first, end);
	pthread_mutex_unlock(&A->lock);
}

void iswf_disown(const char *at, size_t bytes)
{
	uint32_t first = page_of(at);

	forget(first, first + pages_of(bytes));
}

void iswf_withdraw(uint32_t first, uint32_t end)
{
	extents_withdraw(first, end);
	forget(first, end);
}

/* Slots of a range that is no longer needed; some may be in use still. */
static void retire_slots(char *at, uint32_t slots, uint32_t *free_count)
{
	if (*free_count != slots)
		return;
	*free_count = 0;
	pthread_mutex_unlock(&A->lock);
	(void)A->ops->unmap(at, (size_t)slots * ISWF_BLOCK_BYTES);
	pthread_mutex_lock(&A->lock);
}

/* What lies behind the blocks that were used is no part of the arena from now on. */
static void retire_unused(void)
{
	uint32_t first = A->blocks_used * ISWF_BLOCK_PAGES;

	atomic_store(&A->blocks_count, A->blocks_used);
	extents_withdraw(first, arena_pages);
	if (first < arena_pages)
		(void)ask_kernel(first, arena_pages, -1);
}

void iswf_retire(void)
{
	if (A->retired) /* others may have mapped something where the arena was */
		return;
	A->retired = true;
	if (A->shadow_free_count == ISWF_SHADOW_SLOTS) /* nobody is about to send */
		iswf_end_digests();
	retire_unused();
	while (extents_count > 0) {
		struct extent last = extents[--extents_count];

		(void)in_blocks(last.first, last.first + last.pages, lose);
		(void)ask_kernel(last.first, last.first + last.pages, -1);
	}
	retire_slots(A->shadow, ISWF_SHADOW_SLOTS, &A->shadow_free_count);
	while (A->ready_count > 0)
		A->cradle_free[A->cradle_free_count++] = A->ready[--A->ready_count];
	retire_slots(A->cradle, ISWF_CRADLE_SLOTS, &A->cradle_free_count);
}
