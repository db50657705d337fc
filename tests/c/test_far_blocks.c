/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent's handlers of blocks in any order: a kernel and a device of memory arrays, which know
 * what is present where, fail as they like, and run other handlers in the middle of one. After each
 * step the program sees what it wrote last, and zeros where it discarded.
 *
 *     test_far_blocks [SEED [STEPS]]
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "check.h"
#include "far/agent.h"
#include "far/real.h"

#define BLOCKS 6u
#define PAGES  (BLOCKS * ISWF_BLOCK_PAGES)
#define DEPTH  2u

#define A (&iswf_agent)

/* A page of a simulated range holds one value; 0 is zeros. */
struct range {
	char *at;
	uint32_t pages;
	bool *present, *poisoned;
	uint64_t *value;
};

static struct range arena, shadow, cradle;
static struct {
	bool placed;
	uint64_t value[ISWF_BLOCK_PAGES];
	bool lost[ISWF_BLOCK_PAGES];
} device[BLOCKS];
static uint64_t model[PAGES]; /* what the program sees; UINT64_MAX: lost */
static bool unmapped[PAGES], left[BLOCKS];
static uint64_t random_state, now_ns, values;
static uint32_t depth, places;
static bool lossy;

static uint64_t draw(void)
{
	random_state ^= random_state >> 12;
	random_state ^= random_state << 25;
	random_state ^= random_state >> 27;
	return random_state * 2685821657736338717ull;
}

static uint32_t below(uint32_t limit)
{
	return (uint32_t)((draw() >> 33) % limit);
}

/* ------------------------------------------------------------- what the agent needs of others */

uint64_t iswf_now_ns(void)
{
	return now_ns += 1000;
}

const struct iswf_ops iswf_real_ops;

const struct iswf_real *iswf_real(void)
{
	static const struct iswf_real real = {.mmap = mmap};

	return &real;
}

/* ------------------------------------------------------------------- the kernel */

static struct range *range_of(const char *at, uint32_t *page_out)
{
	struct range *ranges[] = {&arena, &shadow, &cradle};

	for (uint32_t i = 0; i < 3; i++) {
		struct range *r = ranges[i];

		if (at < r->at || at >= r->at + (size_t)r->pages * ISWF_PAGE_BYTES)
			continue;
		*page_out = (uint32_t)((at - r->at) / ISWF_PAGE_BYTES);
		return r;
	}
	return NULL;
}

static struct range make_range(uint32_t pages)
{
	struct range r = {.pages = pages};

	r.at = mmap(NULL, (size_t)pages * ISWF_PAGE_BYTES, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	r.present = calloc(pages, sizeof(bool));
	r.poisoned = calloc(pages, sizeof(bool));
	r.value = calloc(pages, sizeof(uint64_t));
	CHECK(r.at != MAP_FAILED && r.present && r.poisoned && r.value);
	return r;
}

static void meanwhile(void);

static int fake_move(char *to, char *from, size_t bytes, size_t *moved_out)
{
	uint32_t to_page, from_page, pages = (uint32_t)(bytes / ISWF_PAGE_BYTES), i;
	struct range *t, *f;

	meanwhile();
	t = range_of(to, &to_page);
	f = range_of(from, &from_page);
	CHECK(t && f);
	for (i = 0; i < pages; i++) {
		if (f->poisoned[from_page + i] || (f == &arena && below(400) == 0))
			break;    /* nothing to move, or pinned */
		if (f == &cradle) /* what lies there is written by the agent itself */
			memcpy(&f->value[from_page + i],
			       f->at + (size_t)(from_page + i) * ISWF_PAGE_BYTES, 8);
		else if (!f->present[from_page + i])
			continue;
		CHECK(!t->present[to_page + i]); /* EEXIST: never seen */
		t->present[to_page + i] = true;
		t->value[to_page + i] = f->value[from_page + i];
		f->present[from_page + i] = false;
		if (f == &cradle) /* the next one there is a new page */
			memset(f->at + (size_t)(from_page + i) * ISWF_PAGE_BYTES, 0, 8);
	}
	*moved_out = (size_t)i * ISWF_PAGE_BYTES;
	return i < pages ? -EBUSY : 0;
}

/* From the agent's zeros, from the shadow, or from the ring: there a page begins with its value. */
static int fake_copy(char *to, const char *from, size_t bytes)
{
	uint32_t page, from_page;
	struct range *t = range_of(to, &page), *f = range_of(from, &from_page);

	meanwhile();
	CHECK(t == &arena);
	for (uint32_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++) {
		if (t->present[page + i] || unmapped[page + i])
			continue;
		t->present[page + i] = true;
		if (f)
			t->value[page + i] = f->value[from_page + i];
		else
			memcpy(&t->value[page + i], from + (size_t)i * ISWF_PAGE_BYTES, 8);
	}
	return 0;
}

static int fake_zero(char *at, size_t bytes)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	CHECK(r && bytes == ISWF_PAGE_BYTES);
	if (r->present[page])
		return -EEXIST;
	r->present[page] = true;
	r->value[page] = 0;
	return 0;
}

static int fake_poison(char *at, size_t bytes)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	CHECK(r == &arena && bytes == ISWF_PAGE_BYTES && !r->present[page]);
	r->present[page] = r->poisoned[page] = true;
	return 0;
}

static void fake_wake(char *at, size_t bytes)
{
	(void)at, (void)bytes;
}

static void fake_discard(char *at, size_t bytes, bool is_watched)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	meanwhile();
	CHECK(r);
	for (uint32_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++) {
		CHECK(r != &arena || !unmapped[page + i]);
		CHECK(r != &arena || is_watched == !left[(page + i) / ISWF_BLOCK_PAGES]);
		r->present[page + i] = r->poisoned[page + i] = false;
		if (r == &cradle)
			memset(r->at + (size_t)(page + i) * ISWF_PAGE_BYTES, 0, 8);
	}
}

/* F2: an unregistered range has nothing elsewhere; from then on the kernel fills it. */
static int fake_leave(char *at, size_t bytes, bool children)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	(void)children;
	CHECK(r == &arena);
	for (uint32_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++)
		CHECK((r->present[page + i] || model[page + i] == 0) && !unmapped[page + i]);
	left[page / ISWF_BLOCK_PAGES] = true;
	return 0;
}

/* ------------------------------------------------------------------- the device */

static int device_write(uint32_t block, uint32_t first, uint32_t pages, const char *bytes)
{
	uint32_t from;
	struct range *f = range_of(bytes, &from);

	CHECK(f == &shadow);
	if (!device[block].placed && places == 0)
		return -ENOSPC;
	places -= !device[block].placed;
	device[block].placed = true;
	if (below(60) == 0)
		return -EIO;
	for (uint32_t i = 0; i < pages; i++) {
		/* A hole: the thread that copies faults there. */
		while (!f->present[from + i])
			iswf_fault(f->at + (size_t)(from + i) * ISWF_PAGE_BYTES);
		device[block].value[first + i] = f->value[from + i];
		device[block].lost[first + i] = lossy && below(5000) == 0;
	}
	return 0;
}

static int device_read(uint32_t block, uint32_t first, uint32_t pages,
		       int (*take)(void *ctx, const char *from), void *ctx)
{
	static char slots[DEPTH + 1][ISWF_BLOCK_BYTES]; /* as in a ring: each request has its own */
	char *ring = slots[depth];

	CHECK(device[block].placed);
	if (below(50) == 0)
		return -EIO;
	for (uint32_t i = 0; i < pages; i++) {
		if (device[block].lost[first + i])
			return pages == 1 ? -ENODATA : -EIO;
		memcpy(ring + (size_t)i * ISWF_PAGE_BYTES, &device[block].value[first + i], 8);
	}
	return take(ctx, ring);
}

static int fake_ask(enum iswf_op op, uint32_t block, uint32_t first, uint32_t pages, char *bytes,
		    int (*take)(void *ctx, const char *from), void *ctx)
{
	meanwhile();
	if (op == ISWF_WRITE)
		return device_write(block, first, pages, bytes);
	if (op == ISWF_READ)
		return device_read(block, first, pages, take, ctx);
	if (!device[block].placed)
		return -ENOENT;
	CHECK_EQ(pages, ISWF_BLOCK_PAGES);
	device[block].placed = false;
	places++;
	return 0;
}

static const struct iswf_ops fake_ops = {
	.move = fake_move,
	.copy = fake_copy,
	.zero = fake_zero,
	.poison = fake_poison,
	.wake = fake_wake,
	.discard = fake_discard,
	.leave = fake_leave,
	.ask = fake_ask,
};

/* ------------------------------------------------------------------- the program */

/* Touches the page: true when it is there, false when its block is busy or its bytes are lost. */
static bool touch(uint32_t page)
{
	char *at = arena.at + (size_t)page * ISWF_PAGE_BYTES;

	for (uint32_t i = 0; !arena.present[page] && i < 4; i++) {
		if (left[page / ISWF_BLOCK_PAGES]) {
			arena.present[page] = true;
			arena.value[page] = 0;
		} else {
			iswf_fault(at);
		}
	}
	if (!arena.present[page])
		return false;
	if (arena.poisoned[page]) {
		CHECK(lossy);
		model[page] = UINT64_MAX;
		return false;
	}
	return true;
}

static void look(uint32_t page)
{
	if (unmapped[page] || !touch(page))
		return;
	if (arena.value[page] != model[page])
		fprintf(stderr, "page %u of block %u: %llu, not %llu\n", page % ISWF_BLOCK_PAGES,
			page / ISWF_BLOCK_PAGES, (unsigned long long)arena.value[page],
			(unsigned long long)model[page]);
	CHECK_EQ(arena.value[page], model[page]);
}

static void change(uint32_t page)
{
	if (!unmapped[page] && touch(page))
		arena.value[page] = model[page] = ++values;
}

static bool is_busy(uint32_t block)
{
	return A->blocks[block].claimed;
}

static bool has_hole(uint32_t block)
{
	return iswf_mask_any(&A->blocks[block].hole);
}

static void forget(uint32_t block, uint32_t first, uint32_t end)
{
	for (uint32_t page = first; page < end; page++)
		model[block * ISWF_BLOCK_PAGES + page] = 0;
}

/* By the agent's own call. */
static void discard(uint32_t block, uint32_t first, uint32_t end)
{
	if (is_busy(block))
		return;
	for (uint32_t page = first; page < end; page++)
		if (unmapped[block * ISWF_BLOCK_PAGES + page])
			return;
	pthread_mutex_lock(&A->lock);
	iswf_discard(block, first, end, false);
	pthread_mutex_unlock(&A->lock);
	forget(block, first, end);
}

/* By a call that the agent only hears of afterwards. */
static void discard_behind(uint32_t block, uint32_t first, uint32_t end)
{
	uint32_t base = block * ISWF_BLOCK_PAGES;

	if (is_busy(block) || left[block] || has_hole(block))
		return;
	for (uint32_t page = base + first; page < base + end; page++)
		arena.present[page] = arena.poisoned[page] = false;
	iswf_removed(iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES,
		     iswf_at(block) + (size_t)end * ISWF_PAGE_BYTES, false, NULL);
	forget(block, first, end);
}

static void unmap_behind(uint32_t block, uint32_t first, uint32_t end)
{
	uint32_t base = block * ISWF_BLOCK_PAGES;

	if (is_busy(block) || left[block])
		return;
	for (uint32_t page = base + first; page < base + end; page++) {
		arena.present[page] = false;
		unmapped[page] = true;
	}
	iswf_removed(iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES,
		     iswf_at(block) + (size_t)end * ISWF_PAGE_BYTES, true, NULL);
}

static void hand_back(uint32_t block)
{
	if (is_busy(block))
		return;
	pthread_mutex_lock(&A->lock);
	iswf_hand_back(block, block + 1, true, ISWF_WHY_LOCKED);
	pthread_mutex_unlock(&A->lock);
}

/* ------------------------------------------------------------------- the order */

static void step(bool rare)
{
	uint32_t block = below(BLOCKS), first = below(ISWF_BLOCK_PAGES);
	uint32_t end = first + 1 + below(ISWF_BLOCK_PAGES - first);
	uint32_t page = block * ISWF_BLOCK_PAGES + first, kind = below(rare ? 1000 : 950);

	if (kind < 250) {
		look(page);
	} else if (kind < 400) {
		change(page);
	} else if (kind < 450) {
		for (uint32_t i = first; i < end; i++)
			change(block * ISWF_BLOCK_PAGES + i);
	} else if (kind < 500) {
		for (uint32_t i = first; i < end; i++)
			look(block * ISWF_BLOCK_PAGES + i);
	} else if (kind < 650) {
		(void)iswf_evict();
	} else if (kind < 800) {
		(void)iswf_send();
	} else if (kind < 850) {
		(void)iswf_drop();
	} else if (kind < 900) {
		discard(block, first, end);
	} else if (kind < 950) {
		discard_behind(block, first, end);
	} else if (kind < 951) {
		hand_back(block);
	} else if (kind < 952) {
		unmap_behind(block, first, end);
	}
}

/* Others run while one handler waits for kernel or device. */
static void meanwhile(void)
{
	if (depth >= DEPTH || below(3) != 0)
		return;
	depth++;
	step(false);
	depth--;
}

static void begin(void)
{
	static struct iswf_block blocks[BLOCKS];

	arena = make_range(PAGES);
	shadow = make_range(ISWF_SHADOW_SLOTS * ISWF_BLOCK_PAGES);
	cradle = make_range(ISWF_CRADLE_SLOTS * ISWF_BLOCK_PAGES);
	memset(blocks, 0, sizeof(blocks));
	memset(device, 0, sizeof(device));
	memset(model, 0, sizeof(model));
	memset(unmapped, 0, sizeof(unmapped));
	memset(left, 0, sizeof(left));
	A->ops = &fake_ops;
	A->arena = arena.at;
	A->shadow = shadow.at;
	A->cradle = cradle.at;
	A->blocks = blocks;
	A->blocks_count = BLOCKS;
	A->budget_pages = PAGES;
	A->held_pages = 0;
	A->full_until_ns = 0;
	memset(A->queues, 0, sizeof(A->queues));
	A->shadow_free_count = A->cradle_free_count = 0;
	for (uint32_t i = 0; i < 3; i++) /* few, so that they are used again */
		A->shadow_free[A->shadow_free_count++] = i;
	for (uint32_t i = 0; i < ISWF_CRADLE_SLOTS; i++)
		A->cradle_free[A->cradle_free_count++] = i;
	for (uint32_t i = 0; i < BLOCKS; i++)
		blocks[i].live = iswf_mask_range(0, ISWF_BLOCK_PAGES);
}

/* Each page is at one place by the books, and the books are right. */
static void check_books(void)
{
	int64_t held = 0;

	for (uint32_t block = 0; block < BLOCKS; block++) {
		const struct iswf_block *b = &A->blocks[block];

		CHECK(!b->claimed);
		for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++) {
			uint32_t where = iswf_has(&b->home, page) + iswf_has(&b->aside, page) +
					 iswf_has(&b->far, page);

			CHECK(where <= 1);
			CHECK(!iswf_has(&b->aside, page) || b->slot != 0);
			if (iswf_has(&b->home, page))
				CHECK(arena.present[block * ISWF_BLOCK_PAGES + page]);
		}
		held += iswf_mask_count(&b->home) + (int64_t)iswf_mask_count(&b->aside);
	}
	CHECK_EQ(held, A->held_pages);
	CHECK_EQ(A->shadow_free_count + A->queues[ISWF_Q_ASIDE].count, 3);
	CHECK_EQ(A->cradle_free_count, ISWF_CRADLE_SLOTS);
}

static void run(uint64_t seed, uint32_t steps)
{
	random_state = seed * 2654435761u + 88172645463325252ull;
	lossy = seed % 4 == 3;
	places = seed % 4 == 2 ? BLOCKS / 2 : BLOCKS;
	begin();
	for (uint32_t i = 0; i < steps; i++) {
		step(true);
		check_books();
		if (below(50) == 0)
			now_ns += 2000000000;
	}
	for (uint32_t page = 0; page < PAGES; page++)
		look(page);
	munmap(arena.at, (size_t)arena.pages * ISWF_PAGE_BYTES);
	munmap(shadow.at, (size_t)shadow.pages * ISWF_PAGE_BYTES);
	munmap(cradle.at, (size_t)cradle.pages * ISWF_PAGE_BYTES);
	struct range *ranges[] = {&arena, &shadow, &cradle};

	for (uint32_t i = 0; i < 3; i++) {
		free(ranges[i]->present);
		free(ranges[i]->poisoned);
		free(ranges[i]->value);
	}
}

int main(int argc, char **argv)
{
	uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
	uint64_t seeds = argc > 1 ? 1 : 60;
	uint32_t steps = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 600;

	for (uint64_t seed = first; seed < first + seeds; seed++) {
		printf("seed %llu\n", (unsigned long long)seed);
		fflush(stdout);
		run(seed, steps);
	}
	return 0;
}
