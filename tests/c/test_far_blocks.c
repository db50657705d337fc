/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The agent's handlers of blocks in any order: a kernel and a device of memory arrays, which know
 * what is present where, fail as they like, and run other handlers in the middle of one. The
 * program allocates, frees, discards, unmaps, moves and lays over, by calls that the agent sees and
 * by others of which it only hears afterwards. After each step the program sees what it wrote last,
 * and zeros where it discarded.
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
#define SLOTS  3u /* few, so that they are used again */
#define EVENTS 64u
#define ALLOCS 24u
#define LOST   UINT64_MAX
/* All fetches of late were late. */
#define LATE 1024u
/* Of all blocks that were bought by parts little was wanted. */
#define UNUSED 1024u
/* A budget beside which a few blocks are little. */
#define LARGE_PAGES (64 * (int64_t)ISWF_BLOCK_PAGES)

#define A (&iswf_agent)

/* A page of a simulated range holds one value; 0 is zeros. */
struct range {
	char *at;
	uint32_t pages;
	bool *present, *poisoned;
	uint64_t *value;
};

/* elsewhere: where the program moves pages to, each to the place of its own number. */
static struct range arena, shadow, cradle, elsewhere;
static struct {
	bool placed;
	uint64_t value[ISWF_BLOCK_PAGES];
	bool lost[ISWF_BLOCK_PAGES];
} device[BLOCKS];

/* What the program knows of a page of the arena. */
static struct {
	uint64_t value; /* LOST: its bytes are lost */
	bool owned;
	bool foreign; /* no mapping of the agent's is there any more */
	bool laid;    /* likewise, but it is freed with the allocation that it lies in */
	bool changes; /* a call that changes it is under way */
	bool moved;   /* it is elsewhere, with this value */
	bool any;     /* what it holds was never said: as malloc() gives it */
} model[PAGES];
static bool left[BLOCKS];               /* not registered: the kernel fills it */
static uint32_t watch_refused = BLOCKS; /* this block's registration */
static bool tables[BLOCKS];             /* of the arena: of single pages that are there, or were */
static void (*meanwhile_once)(void);    /* while the next discard is under way */
static void (*left_once)(void);         /* behind the next range that is unregistered */
static void (*there_once)(void);        /* while the kernel is asked next what is there */
static uint32_t discards_refused;

/*
 * Read by the agent, not served; the kernel forgets the pages of a discard only `later`, and then
 * (MADV_FREE) perhaps not all of them.
 */
static struct event {
	uint32_t first, end;
	bool unmaps, moves, later, lazy;
} events[EVENTS];
static uint32_t events_count;
static bool serving;

static struct {
	uint32_t first, pages;
} allocs[ALLOCS];

/* Threads that wait for a page, one for each depth. */
static struct {
	uint32_t page;
	bool woken;
} waiters[DEPTH + 1];

static uint64_t random_state, now_ns, values, swap_pages;
static uint32_t depth, places, busy_block, writes, reads, confirms;
static bool fails_once;  /* the next write */
static bool all_pinned;  /* of the arena */
static bool lossy, calm; /* calm: nothing fails, and handlers run one by one */

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
	static const struct iswf_real real = {.mmap = mmap, .madvise = madvise};

	return &real;
}

/* ------------------------------------------------------------------- the kernel */

static struct range *range_of(const char *at, uint32_t *page_out)
{
	struct range *ranges[] = {&arena, &shadow, &cradle, &elsewhere};

	for (uint32_t i = 0; i < 4; i++) {
		struct range *r = ranges[i];

		if (at < r->at || at >= r->at + (size_t)r->pages * ISWF_PAGE_BYTES)
			continue;
		*page_out = (uint32_t)((at - r->at) / ISWF_PAGE_BYTES);
		if (r == &arena)
			busy_block = *page_out / ISWF_BLOCK_PAGES;
		return r;
	}
	return NULL;
}

static char *page_at(const struct range *r, uint32_t page)
{
	return r->at + (size_t)page * ISWF_PAGE_BYTES;
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

static void end_range(struct range *r)
{
	munmap(r->at, (size_t)r->pages * ISWF_PAGE_BYTES);
	free(r->present);
	free(r->poisoned);
	free(r->value);
}

static void meanwhile(void);
static bool serve(void);

static void wake(const struct range *r, uint32_t page)
{
	for (uint32_t i = 0; r == &arena && i <= depth; i++)
		if (waiters[i].page == page)
			waiters[i].woken = true;
}

/* F3: while an event is not served nothing of the arena may change. */
static bool is_refused(const struct range *r)
{
	return r == &arena && events_count != 0;
}

static void set_tables(const struct range *r, uint32_t page)
{
	if (r == &arena)
		tables[page / ISWF_BLOCK_PAGES] = true;
}

static int fake_move(char *to, char *from, size_t bytes, size_t *done_out)
{
	uint32_t to_page, from_page, pages = (uint32_t)(bytes / ISWF_PAGE_BYTES), i;
	struct range *t, *f;
	int code = 0;

	meanwhile();
	*done_out = 0;
	t = range_of(to, &to_page);
	f = range_of(from, &from_page);
	CHECK(t && f);
	if (is_refused(t) || is_refused(f))
		return -EAGAIN;
	if (!calm && t == &arena && below(200) == 0)
		return -EINVAL; /* it is locked, say */
	CHECK(f != &cradle || t != &arena || !tables[to_page / ISWF_BLOCK_PAGES]);
	if (pages < ISWF_BLOCK_PAGES)
		set_tables(t, to_page), set_tables(f, from_page);
	for (i = 0; i < pages; i++) {
		CHECK(f != &arena || !model[from_page + i].foreign);
		CHECK(t != &arena || !model[to_page + i].foreign);
		if (f == &cradle) /* what lies there is written by the agent itself */
			memcpy(&f->value[from_page + i], page_at(f, from_page + i), 8);
		else if (!f->present[from_page + i])
			continue;
		code = t->present[to_page + i]                                     ? -EEXIST
		       : f->poisoned[from_page + i]                                ? -EFAULT
		       : f == &arena && (all_pinned || (!calm && below(400) == 0)) ? -EBUSY
										   : 0;
		if (code != 0)
			break;
		t->present[to_page + i] = true;
		t->value[to_page + i] = f->value[from_page + i];
		f->present[from_page + i] = false;
		wake(t, to_page + i);
		if (f == &cradle) /* the next one there is a new page */
			memset(page_at(f, from_page + i), 0, 8);
	}
	*done_out = (size_t)i * ISWF_PAGE_BYTES;
	return code;
}

/* From the agent's zeros, from the shadow, or from the ring: there a page begins with its value. */
static int fake_copy(char *to, const char *from, size_t bytes, bool moved, size_t *done_out)
{
	uint32_t page, from_page;
	struct range *t = range_of(to, &page), *f = range_of(from, &from_page);

	meanwhile();
	*done_out = 0;
	CHECK(t == (moved ? &elsewhere : &arena));
	if (is_refused(t))
		return -EAGAIN;
	for (uint32_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++) {
		CHECK(t != &arena || !model[page + i].foreign);
		if (t->present[page + i])
			return -EEXIST;
		if (!calm && below(1000) == 0)
			return -ENOMEM;
		CHECK(!f || f->present[from_page + i]); /* F6: else it would wait for the reader */
		set_tables(t, page);
		t->present[page + i] = true;
		if (f)
			t->value[page + i] = f->value[from_page + i];
		else
			memcpy(&t->value[page + i], from + (size_t)i * ISWF_PAGE_BYTES, 8);
		wake(t, page + i);
		*done_out += ISWF_PAGE_BYTES;
	}
	return 0;
}

static int fake_zero(char *at)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	CHECK(r);
	if (is_refused(r))
		return -EAGAIN;
	if (r == &arena && (model[page].foreign || left[page / ISWF_BLOCK_PAGES]))
		return -ENOENT;
	if (r->present[page])
		return -EEXIST;
	set_tables(r, page);
	r->present[page] = true;
	r->value[page] = 0;
	wake(r, page);
	return 0;
}

static int fake_poison(char *at, bool moved)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	CHECK(r == (moved ? &elsewhere : &arena) && lossy);
	if (is_refused(r))
		return -EAGAIN;
	if (r->present[page])
		return -EEXIST;
	set_tables(r, page);
	r->present[page] = r->poisoned[page] = true;
	wake(r, page);
	return 0;
}

static void fake_wake(char *at, size_t bytes)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	for (uint32_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++)
		wake(r, page + i);
}

static void call_once(void (**call)(void))
{
	void (*now)(void) = *call;

	*call = NULL;
	if (now != NULL)
		now();
}

static int fake_discard(char *at, size_t bytes, bool is_watched)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	meanwhile();
	CHECK(r);
	call_once(&meanwhile_once);
	if (discards_refused > 0) {
		discards_refused--;
		return -EINVAL;
	}
	for (uint32_t i = 0; r == &arena && i < bytes / ISWF_PAGE_BYTES; i++) {
		if (!model[page + i].foreign)
			continue;
		CHECK(events_count != 0); /* the agent has not heard of it yet */
		return -ENOMEM;
	}
	if (bytes == ISWF_BLOCK_BYTES && r == &arena && A->tables_go)
		tables[page / ISWF_BLOCK_PAGES] = false;
	for (uint32_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++) {
		CHECK(r != &arena || model[page + i].changes || !model[page + i].owned);
		if (bytes < ISWF_BLOCK_BYTES && r->present[page + i])
			set_tables(r, page);
		/* Else its event counts as the program's. Of a part that has left there is none. */
		CHECK(r != &arena || is_watched || left[(page + i) / ISWF_BLOCK_PAGES]);
		r->present[page + i] = r->poisoned[page + i] = false;
	}
	return 0;
}

static int fake_renew(char *slot)
{
	uint32_t page;

	CHECK(range_of(slot, &page) == &cradle && page % ISWF_BLOCK_PAGES == 0);
	if (!calm && below(50) == 0)
		return -EAGAIN; /* all may be locked, say */
	for (uint32_t i = 0; i < ISWF_BLOCK_PAGES; i++) {
		cradle.present[page + i] = false;
		memset(page_at(&cradle, page + i), 0, 8);
	}
	return 0;
}

static bool fake_is_huge(const char *at)
{
	uint32_t page;

	if (range_of((char *)(uintptr_t)at, &page) == &arena && tables[page / ISWF_BLOCK_PAGES])
		return false;
	return calm || below(4) != 0;
}

/* Whatever is there is gone, as after any discard. */
static bool fake_untable(char *at)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	meanwhile();
	CHECK(page % ISWF_BLOCK_PAGES == 0);
	if (is_refused(r) || !A->tables_go || (!calm && below(4) == 0))
		return false;
	for (uint32_t i = page; i < page + ISWF_BLOCK_PAGES; i++) {
		CHECK(r != &arena || (!r->present[i] && !r->poisoned[i] && !model[i].foreign));
		r->present[i] = false;
	}
	if (r == &arena)
		tables[page / ISWF_BLOCK_PAGES] = false;
	return true;
}

static void fake_fill_holes(char *at, size_t bytes)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	CHECK(r == &shadow);
	for (uint32_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++) {
		if (r->present[page + i])
			continue;
		r->present[page + i] = true;
		r->value[page + i] = 0;
	}
}

static bool fake_is_zeros(const char *at)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	CHECK(r == &shadow && r->present[page]); /* F6 */
	return r->value[page] == 0;
}

/* Of what is there, or of bytes in the ring or the cradle: see fake_copy(). */
static struct iswf_digest fake_digest(const char *at)
{
	struct iswf_digest digest = {.high = 1};
	uint32_t page;
	struct range *r = range_of((char *)(uintptr_t)at, &page);

	CHECK(r != &arena && (r != &shadow || r->present[page])); /* F6 */
	if (r == &shadow)
		digest.low = r->value[page];
	else
		memcpy(&digest.low, at, sizeof(digest.low));
	return digest;
}

static void take_mapping(uint32_t page)
{
	arena.present[page] = arena.poisoned[page] = false;
	model[page].foreign = true;
	model[page].owned = false;
}

static int fake_unmap(char *at, size_t bytes)
{
	uint32_t page;

	CHECK(range_of(at, &page) == &arena);
	for (uint32_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++) {
		CHECK(model[page + i].changes || model[page + i].foreign);
		take_mapping(page + i);
	}
	return 0;
}

/* Of what is the kernel's already. */
static int fake_advise(char *at, size_t bytes, int advice)
{
	uint32_t page;

	CHECK(range_of(at, &page) == &arena && advice == MADV_DONTNEED);
	for (uint32_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++)
		CHECK(model[page + i].foreign);
	return 0;
}

/* F2: an unregistered range has nothing elsewhere; from then on the kernel fills it. */
static int fake_leave(char *at, size_t bytes, bool children)
{
	uint32_t page;
	struct range *r = range_of(at, &page);

	(void)children;
	if (r == &elsewhere)
		return 0;
	CHECK(r == &arena);
	if (below(20) == 0)
		return -ENOMEM;
	for (uint32_t i = 0; i < bytes / ISWF_PAGE_BYTES; i++)
		CHECK(r->present[page + i] || !model[page + i].owned || model[page + i].foreign ||
		      model[page + i].changes || model[page + i].value == 0);
	left[page / ISWF_BLOCK_PAGES] = true;
	call_once(&left_once);
	return 0;
}

/* All of a block, or what of it is no hole. */
static int fake_watch(char *at, size_t bytes)
{
	uint32_t page, end;

	meanwhile();
	CHECK(range_of(at, &page) == &arena);
	end = page + (uint32_t)(bytes / ISWF_PAGE_BYTES);
	if (watch_refused >= page / ISWF_BLOCK_PAGES &&
	    watch_refused <= (end - 1) / ISWF_BLOCK_PAGES && watch_refused < BLOCKS)
		return -EINVAL;
	for (uint32_t i = page; i < end; i++) {
		CHECK(!A->blocks[i / ISWF_BLOCK_PAGES].left && !model[i].foreign);
		left[i / ISWF_BLOCK_PAGES] = false;
	}
	return 0;
}

static struct iswf_mask fake_there(const char *at)
{
	struct iswf_mask there = {{0}};
	uint32_t page;

	CHECK(range_of(at, &page) == &arena);
	meanwhile();
	call_once(&there_once);
	for (uint32_t i = 0; i < ISWF_BLOCK_PAGES; i++)
		if (arena.present[page + i])
			iswf_set(&there, i);
	meanwhile();
	return there;
}

static uint64_t fake_free_swap_pages(void)
{
	return swap_pages;
}

static void fake_pause(uint64_t ns)
{
	now_ns += ns;
	(void)serve();
	meanwhile();
}

/* ------------------------------------------------------------------- the device */

static int device_write(uint32_t block, uint32_t first, uint32_t pages, const char *bytes)
{
	uint32_t from;
	struct range *f = range_of(bytes, &from);
	bool fails;

	CHECK(f == &shadow);
	writes++;
	if (!device[block].placed && places == 0)
		return -ENOSPC;
	places -= !device[block].placed;
	device[block].placed = true;
	fails = fails_once || (!calm && below(60) == 0);
	fails_once = false;
	for (uint32_t i = 0; i < pages; i++) {
		if (fails && i % 2 != 0) /* what it has of such a page is not said */
			continue;
		CHECK(f->present[from + i]); /* F6: the thread that copies would fault */
		device[block].value[first + i] = f->value[from + i];
		device[block].lost[first + i] = lossy && below(5000) == 0;
	}
	return fails ? -EIO : 0;
}

static int device_read(uint32_t block, uint32_t first, uint32_t pages,
		       int (*take)(void *ctx, const char *from), void *ctx)
{
	static char slots[DEPTH + 1][ISWF_BLOCK_BYTES]; /* as in a ring: each request has its own */
	char *ring = slots[depth];

	CHECK(device[block].placed);
	reads++;
	if (!calm && below(50) == 0)
		return -EIO;
	for (uint32_t i = 0; i < pages; i++) {
		if (device[block].lost[first + i])
			return pages == 1 ? -ENODATA : -EIO;
		memcpy(ring + (size_t)i * ISWF_PAGE_BYTES, &device[block].value[first + i], 8);
	}
	busy_block = block;
	meanwhile();
	return take(ctx, ring);
}

/* Copies may be lost at any time; what is far then is lost, and what is known is not. */
static int device_confirm(uint32_t block, uint32_t first, uint32_t pages)
{
	CHECK(device[block].placed);
	confirms++;
	for (uint32_t i = 0; i < pages; i++) {
		device[block].lost[first + i] |= lossy && below(5000) == 0;
		if (device[block].lost[first + i])
			return -EIO;
	}
	return calm || below(20) != 0 ? 0 : -EIO;
}

static int fake_ask(enum iswf_op op, uint32_t block, uint32_t first, uint32_t pages, char *bytes,
		    int (*take)(void *ctx, const char *from), void *ctx)
{
	meanwhile();
	if (op == ISWF_WRITE)
		return device_write(block, first, pages, bytes);
	if (op == ISWF_READ)
		return device_read(block, first, pages, take, ctx);
	if (op == ISWF_CONFIRM)
		return device_confirm(block, first, pages);
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
	.renew = fake_renew,
	.is_huge = fake_is_huge,
	.untable = fake_untable,
	.fill_holes = fake_fill_holes,
	.is_zeros = fake_is_zeros,
	.digest = fake_digest,
	.unmap = fake_unmap,
	.advise = fake_advise,
	.leave = fake_leave,
	.watch = fake_watch,
	.there = fake_there,
	.pause = fake_pause,
	.free_swap_pages = fake_free_swap_pages,
	.ask = fake_ask,
};

/* ------------------------------------------------------------------- events */

static bool is_busy(uint32_t block)
{
	return A->blocks[block].claimed;
}

/* The call that is behind a discard ends: the kernel has forgotten the pages. */
static void forget_later(const struct event *event)
{
	for (uint32_t page = event->first; event->later && page < event->end; page++) {
		model[page].changes = false;
		if (event->lazy && arena.present[page] && !arena.poisoned[page] && below(2)) {
			model[page].value = arena.value[page];
			model[page].any = false;
			continue;
		}
		arena.present[page] = arena.poisoned[page] = false;
		model[page].value = 0;
		model[page].any = false;
	}
}

/* The first event, by one of the threads that serve; false: there is none, or its block is busy. */
static bool serve(void)
{
	struct event event = events[0];

	if (events_count == 0 || serving || is_busy(event.first / ISWF_BLOCK_PAGES))
		return false;
	serving = true;
	if (event.later && below(2)) {
		forget_later(&event);
		event.later = false;
	}
	iswf_removed(page_at(&arena, event.first), page_at(&arena, event.end), event.unmaps,
		     event.moves ? page_at(&elsewhere, event.first) : NULL);
	memmove(events, events + 1, --events_count * sizeof(*events));
	serving = false;
	/* Before the kernel has forgotten them, other blocks and pages may have their turn. */
	for (uint32_t i = below(20); event.later && i > 0; i--)
		meanwhile();
	forget_later(&event);
	return true;
}

static void serve_all(void)
{
	while (serve())
		;
}

/* Pages that are the program's alone, of one block, in which no call is under way. */
static bool may_change(uint32_t first, uint32_t end)
{
	for (uint32_t page = first; page < end; page++)
		if (!model[page].owned || model[page].foreign || model[page].changes)
			return false;
	return events_count < EVENTS;
}

static void push(struct event event)
{
	events[events_count++] = event;
}

/* By a call that the agent only hears of afterwards: it may end before the agent has served it. */
static void discard_behind(uint32_t first, uint32_t end)
{
	struct event event = {.first = first, .end = end, .later = true, .lazy = below(3) == 0};

	if (A->blocks[first / ISWF_BLOCK_PAGES].left || !may_change(first, end))
		return;
	if (left[first / ISWF_BLOCK_PAGES]) { /* the agent does not hear of it */
		forget_later(&event);
		return;
	}
	for (uint32_t page = first; page < end; page++)
		model[page].changes = true;
	if (below(2)) {
		forget_later(&event);
		event.later = false;
	}
	push(event);
}

static void unmap_behind(uint32_t first, uint32_t end)
{
	if (left[first / ISWF_BLOCK_PAGES] || !may_change(first, end))
		return;
	for (uint32_t page = first; page < end; page++)
		take_mapping(page);
	push((struct event){.first = first, .end = end, .unmaps = true});
}

static void move_behind(uint32_t first, uint32_t end)
{
	if (left[first / ISWF_BLOCK_PAGES] || !may_change(first, end))
		return;
	for (uint32_t page = first; page < end; page++) {
		elsewhere.present[page] = arena.present[page];
		elsewhere.poisoned[page] = arena.poisoned[page];
		elsewhere.value[page] = arena.value[page];
		model[page].moved = true;
		take_mapping(page);
	}
	push((struct event){.first = first, .end = end, .unmaps = true, .moves = true});
}

/* ------------------------------------------------------------------- the program */

/* The kernel's own first touch: a huge page, whose other pages are zeros, or a single one. */
static void fill_unregistered(uint32_t page)
{
	uint32_t base = page - page % ISWF_BLOCK_PAGES;
	bool huge = calm || below(2) != 0;

	for (uint32_t i = base; i < base + ISWF_BLOCK_PAGES; i++)
		huge &= !arena.present[i] && !model[i].foreign;
	if (!huge)
		set_tables(&arena, page);
	for (uint32_t i = base; i < base + ISWF_BLOCK_PAGES; i++) {
		if (i != page && !huge)
			continue;
		arena.present[i] = true;
		arena.value[i] = 0;
	}
}

/* Touches the page: true when it is there, false when its block is busy or its bytes are lost. */
static bool touch(uint32_t page)
{
	uint32_t block = page / ISWF_BLOCK_PAGES;

	for (uint32_t i = 0; !arena.present[page] && i < 8; i++) {
		if (left[block]) {
			fill_unregistered(page);
			break;
		}
		serve_all(); /* the fault was read behind these events */
		if (events_count != 0 || is_busy(block))
			return false;
		waiters[depth].page = page;
		waiters[depth].woken = false;
		iswf_fault(page_at(&arena, page));
		CHECK(waiters[depth].woken || is_busy(block)); /* else it waits for ever */
		waiters[depth].page = PAGES;
	}
	if (!arena.present[page])
		return false;
	if (arena.poisoned[page]) {
		CHECK(lossy);
		model[page].value = LOST;
		return false;
	}
	return true;
}

static bool is_still(uint32_t page)
{
	return model[page].owned && !model[page].foreign && !model[page].changes;
}

static void look(uint32_t page)
{
	if (!is_still(page) || !touch(page) || !is_still(page))
		return;
	if (model[page].any) /* from now on it stays as it is */
		model[page].value = arena.value[page];
	model[page].any = false;
	if (arena.value[page] != model[page].value)
		fprintf(stderr, "page %u of block %u: %llu, not %llu\n", page % ISWF_BLOCK_PAGES,
			page / ISWF_BLOCK_PAGES, (unsigned long long)arena.value[page],
			(unsigned long long)model[page].value);
	CHECK_EQ(arena.value[page], model[page].value);
}

static void change(uint32_t page)
{
	if (!is_still(page) || !touch(page) || !is_still(page))
		return;
	arena.value[page] = model[page].value = ++values;
	model[page].any = false;
}

/* By the agent's own call. */
static void discard(uint32_t first, uint32_t end)
{
	if (is_busy(first / ISWF_BLOCK_PAGES) || !may_change(first, end))
		return;
	for (uint32_t page = first; page < end; page++)
		model[page].changes = true;
	CHECK_EQ(iswf_advise(page_at(&arena, first), (size_t)(end - first) * ISWF_PAGE_BYTES,
			     MADV_DONTNEED),
		 0);
	for (uint32_t page = first; page < end; page++) {
		model[page].value = 0;
		model[page].any = false;
		model[page].changes = false;
	}
}

/* What is handed out belongs to nobody else, and is zeros but for malloc(). */
static void allocate(void)
{
	size_t bytes = below(3) ? 2 * ISWF_BLOCK_BYTES / (1 + below(3)) : 1 + below(1 << 20);
	uint32_t i = below(ALLOCS), first, pages;
	/* Others wait for the end of what is under way. */
	enum iswf_request request = depth == 0 ? (enum iswf_request)below(3) : ISWF_MALLOC;
	bool is_mapping = request == ISWF_MAPPING;
	char *at;

	if (allocs[i].pages != 0 ||
	    (at = iswf_take(bytes, below(2) ? 0 : ISWF_BLOCK_BYTES, request)) == NULL)
		return;
	CHECK(range_of(at, &first) == &arena);
	pages = (uint32_t)((bytes + ISWF_PAGE_BYTES - 1) / ISWF_PAGE_BYTES);
	/* Where a mapping begins another allocator's first allocation may be. */
	CHECK_EQ(iswf_size_of(at), is_mapping ? 0 : pages);
	CHECK_EQ(iswf_size_of_mapping(at), is_mapping ? pages : 0);
	CHECK_EQ(iswf_size_of(at + 16), 0); /* the kernel's own allocator may be there */
	for (uint32_t page = first; page < first + pages; page++) {
		CHECK(!model[page].owned && !model[page].foreign);
		model[page].owned = true;
		model[page].value = 0;
		model[page].any = request == ISWF_MALLOC;
	}
	allocs[i].first = first;
	allocs[i].pages = pages;
}

static bool may_free(uint32_t first, uint32_t end)
{
	for (uint32_t page = first; page < end; page++)
		if (is_busy(page / ISWF_BLOCK_PAGES) || model[page].changes)
			return false;
	return true;
}

/* The allocation, and what was laid over it or unmapped before. */
static void release(uint32_t i)
{
	uint32_t first = allocs[i].first, end = first + allocs[i].pages;

	serve_all();
	if (first == end || events_count != 0 || !may_free(first, end))
		return; /* the agent's call waits for events */
	for (uint32_t page = first; page < end; page++)
		model[page].changes = model[page].owned;
	/* Here the kernel's memory may be by now, so nothing but its own call may ask for it. */
	if (iswf_size_of(page_at(&arena, first)) == allocs[i].pages && below(2))
		iswf_give(page_at(&arena, first));
	else
		CHECK_EQ(
			iswf_unmap(page_at(&arena, first), (size_t)(end - first) * ISWF_PAGE_BYTES),
			0);
	for (uint32_t page = first; page < end; page++) {
		model[page].changes = false;
		model[page].owned = false;
	}
	allocs[i].pages = 0;
}

/* ------------------------------------------------------------- rare: nothing else is under way */

static void hand_back(uint32_t block)
{
	pthread_mutex_lock(&A->lock);
	iswf_hand_back(block, block + 1, true, ISWF_WHY_FORK);
	pthread_mutex_unlock(&A->lock);
}

/* MAP_FIXED, over whatever is there: its pages are the kernel's, and are given to nobody. */
static void lay_over(uint32_t first, uint32_t end)
{
	bool watched = !left[first / ISWF_BLOCK_PAGES];

	serve_all();
	for (uint32_t page = first; page < end; page++)
		if (model[page].changes)
			return;
	for (uint32_t page = first; page < end; page++)
		model[page].changes = true;
	iswf_lay_over(page_at(&arena, first), (size_t)(end - first) * ISWF_PAGE_BYTES,
		      ISWF_WHY_FIXED);
	for (uint32_t page = first; page < end; page++) {
		model[page].changes = false;
		model[page].laid = true;
		take_mapping(page);
	}
	if (watched && !left[first / ISWF_BLOCK_PAGES] && events_count < EVENTS)
		push((struct event){.first = first, .end = end, .unmaps = true});
}

/* ------------------------------------------------------------------- the order */

/* Pages of one block; half of the time of the one at which a handler is at work. */
static void choose(uint32_t *first_out, uint32_t *end_out)
{
	uint32_t block = below(2) ? busy_block : below(BLOCKS), first = below(ISWF_BLOCK_PAGES);
	uint32_t most = below(3) ? 16 : ISWF_BLOCK_PAGES, base = block * ISWF_BLOCK_PAGES;

	if (most > ISWF_BLOCK_PAGES - first)
		most = ISWF_BLOCK_PAGES - first;
	*first_out = base + first;
	*end_out = base + first + 1 + below(most);
}

static void step(bool rare)
{
	uint32_t first, end, kind = below(rare ? 1000 : 985);

	choose(&first, &end);
	if (kind < 230) {
		look(first);
	} else if (kind < 380) {
		change(first);
	} else if (kind < 430) {
		for (uint32_t page = first; page < end; page++)
			change(page);
	} else if (kind < 470) {
		for (uint32_t page = first; page < end; page++)
			look(page);
	} else if (kind < 480) {
		(void)iswf_make_ready();
	} else if (kind < 630) {
		(void)iswf_evict(false);
	} else if (kind < 780) {
		(void)iswf_send();
	} else if (kind < 800) {
		(void)iswf_drop();
	} else if (kind < 820) {
		if (A->wishes_count == 0) /* as if blocks had come in a row */
			A->wishes[A->wishes_count++] = first / ISWF_BLOCK_PAGES;
		(void)iswf_ahead();
	} else if (kind < 860) {
		discard(first, end);
	} else if (kind < 900) {
		discard_behind(first, end);
	} else if (kind < 940) {
		(void)serve();
	} else if (kind < 965) {
		allocate();
	} else if (kind < 980) {
		release(below(ALLOCS));
	} else if (kind < 981) {
		unmap_behind(first, end);
	} else if (kind < 983) {
		move_behind(first, end);
	} else if (kind >= 990 && kind < 994) {
		A->scarce |= below(3) == 0;
		(void)iswf_watch();
	} else if (kind >= 994 && kind < 998) {
		(void)iswf_give_up_stale();
	} else if (kind == 998) {
		hand_back(first / ISWF_BLOCK_PAGES);
	} else if (kind == 999) {
		lay_over(first, end);
	}
}

/* Others run while one handler waits for kernel or device. */
static void meanwhile(void)
{
	if (calm || depth >= DEPTH || below(3) != 0)
		return;
	depth++;
	waiters[depth].page = PAGES;
	step(false);
	depth--;
}

static void begin(void)
{
	static struct iswf_block blocks[BLOCKS];
	static _Alignas(4096) struct iswf_digest digests[PAGES];

	arena = make_range(PAGES);
	elsewhere = make_range(PAGES);
	shadow = make_range(ISWF_SHADOW_SLOTS * ISWF_BLOCK_PAGES);
	cradle = make_range(ISWF_CRADLE_SLOTS * ISWF_BLOCK_PAGES);
	memset(blocks, 0, sizeof(blocks));
	memset(device, 0, sizeof(device));
	memset(model, 0, sizeof(model));
	memset(allocs, 0, sizeof(allocs));
	memset(left, 0, sizeof(left));
	memset(tables, 0, sizeof(tables));
	events_count = busy_block = 0;
	waiters[0].page = PAGES;
	A->ops = &fake_ops;
	A->arena = arena.at;
	A->shadow = shadow.at;
	A->cradle = cradle.at;
	A->blocks = blocks;
	A->digests = digests;
	A->blocks_count = BLOCKS;
	A->budget_pages = PAGES;
	A->held_pages = 0;
	A->blocks_used = 0;
	A->watched = true;
	A->scarce = false;
	A->full_until_ns = A->paused_until_ns = A->pause_ns = A->pause_counted_ns = 0;
	A->strays = A->others = 0;
	A->strays_net = 0;
	A->strays_since_ns = 0;
	A->overfull = A->swap_is_limited = false;
	swap_pages = UINT32_MAX;
	A->tables_go = calm || below(4) != 0;
	memset(A->queues, 0, sizeof(A->queues));
	memset(&A->count, 0, sizeof(A->count));
	A->wishes_count = A->ahead_count = A->whole_count = 0;
	A->fetch_count = A->late = A->unused = A->stays_count = A->ready_count = A->left_count =
		A->turns_count = 0;
	A->shadow_free_count = A->cradle_free_count = 0;
	for (uint32_t i = 0; i < SLOTS; i++)
		A->shadow_free[A->shadow_free_count++] = i;
	for (uint32_t i = 0; i < ISWF_CRADLE_SLOTS; i++)
		A->cradle_free[A->cradle_free_count++] = i;
	CHECK_EQ(iswf_arena_init(PAGES), 0);
}

static void check_page(const struct iswf_block *b, uint32_t block, uint32_t page)
{
	uint32_t number = block * ISWF_BLOCK_PAGES + page;
	bool home = iswf_has(&b->home, page), aside = iswf_has(&b->aside, page);
	bool far = iswf_has(&b->far, page), there = arena.present[number];

	CHECK(home + aside + far <= 1);
	CHECK(!aside || b->slot != 0);
	/* F15: the device has what the digest is of. */
	CHECK(!iswf_has(&b->known, page) || ((home || aside || far) && device[block].placed &&
					     device[block].value[page] == A->digests[number].low));
	if (events_count != 0 || model[number].changes)
		return;
	if (model[number].foreign) {
		CHECK(iswf_has(&b->hole, page) && !home && !aside && !far);
		/* The kernel's own allocator may be there by now. */
		CHECK(model[number].laid || iswf_size_of(page_at(&arena, number)) == 0);
		return;
	}
	CHECK(!iswf_has(&b->hole, page));
	/* What is home and not there is zeros, as what nothing has; what is there is home. */
	CHECK(!home || there || !model[number].owned || model[number].any ||
	      model[number].value == 0);
	CHECK(!there || home || b->left || b->unsure || (!A->watched && arena.value[number] == 0));
}

/* F12: what is free holds nothing of what was there before. */
static void check_free_slots(void)
{
	for (uint32_t i = 0; i < A->shadow_free_count; i++)
		for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
			CHECK(!shadow.present[A->shadow_free[i] * ISWF_BLOCK_PAGES + page]);
}

/* Each page is at one place by the books, and the books are right. */
static void check_books(void)
{
	int64_t held = 0, away = 0;
	uint32_t slots = A->shadow_free_count, ahead = 0;

	for (uint32_t block = 0; block < BLOCKS; block++) {
		const struct iswf_block *b = &A->blocks[block];

		CHECK(!b->claimed);
		for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
			check_page(b, block, page);
		held += iswf_mask_count(&b->home) + (int64_t)iswf_mask_count(&b->aside);
		away += iswf_mask_count(&b->far);
		slots += b->slot != 0;
		ahead += b->ahead;
	}
	CHECK_EQ(ahead, A->ahead_count);
	CHECK_EQ(held, A->held_pages);
	CHECK_EQ(away, (int64_t)A->count.pages_away);
	CHECK_EQ(slots, SLOTS);
	CHECK_EQ(A->cradle_free_count + A->ready_count, ISWF_CRADLE_SLOTS);
	check_free_slots();
}

/* What the program has moved is there, or is zeros that the kernel fills in. */
static void check_elsewhere(void)
{
	for (uint32_t page = 0; page < PAGES; page++) {
		if (!model[page].moved || model[page].any || elsewhere.poisoned[page])
			continue;
		CHECK_EQ(elsewhere.present[page] ? elsewhere.value[page] : 0, model[page].value);
	}
}

static void end_ranges(void)
{
	end_range(&arena);
	end_range(&elsewhere);
	end_range(&shadow);
	end_range(&cradle);
}

/* After begin(): until iswf_watch() the arena is the kernel's. */
static void unwatch(void)
{
	A->watched = false;
	for (uint32_t block = 0; block < BLOCKS; block++)
		left[block] = true;
}

/* The next fetch for a fault does, or somebody else's does now. */
static void begin_pause(void)
{
	A->pause_ns = 0;
	if (!iswf_is_paused(now_ns))
		A->strays = A->strays_net = 1 << 20;
	A->others = below(4) == 0;
	swap_pages = below(4) == 0 ? 0 : UINT32_MAX;
}

static void run(uint64_t seed, uint32_t steps)
{
	calm = false;
	random_state = seed * 2654435761u + 88172645463325252ull;
	lossy = seed % 4 == 3;
	places = seed % 4 == 2 ? BLOCKS / 2 : BLOCKS;
	begin();
	if (seed % 2 != 0)
		A->budget_pages = LARGE_PAGES;
	if (seed % 3 != 0)
		unwatch();
	for (uint32_t i = 0; i < ALLOCS; i++)
		allocate();
	for (uint32_t i = 0; i < steps; i++) {
		step(true);
		check_books();
		if (below(50) == 0)
			now_ns += 2000000000;
		if (below(500) == 0)
			begin_pause();
		iswf_pause_look(now_ns, 0);
	}
	serve_all();
	CHECK_EQ(events_count, 0);
	for (uint32_t page = 0; page < PAGES; page++)
		look(page);
	serve_all();
	check_elsewhere();
	end_ranges();
}

/* Nothing else is under way, nothing is refused, and the device loses nothing. */
static void begin_calm(void)
{
	lossy = false;
	calm = true;
	places = BLOCKS;
	begin();
}

static bool is_aside(uint32_t block)
{
	return iswf_mask_any(&A->blocks[block].aside);
}

/* A block leaves; one that was filled has been looked at for zeros before. */
static bool leave(void)
{
	if (!iswf_evict(false))
		return false;
	return (A->queues[ISWF_Q_ASIDE].count != 0 || iswf_evict(false)) && iswf_send();
}

/* ------------------------------------------------------------------- read-ahead */

/* Every block is the program's, written, and far. */
static void begin_far(void)
{
	char *at;

	begin_calm();
	at = iswf_take((size_t)PAGES * ISWF_PAGE_BYTES, 0, ISWF_MAPPING);
	CHECK(at == arena.at);
	for (uint32_t page = 0; page < PAGES; page++)
		model[page].owned = true;
	for (uint32_t block = 0; block < BLOCKS; block++) {
		for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
			change(block * ISWF_BLOCK_PAGES + page);
		CHECK(leave());
	}
	check_books();
	CHECK_EQ(A->held_pages, 0);
}

/* At any page; the others of it need no further fault. */
static void the_first_touch_of_a_block_makes_all_of_it(void)
{
	begin_calm();
	CHECK(iswf_take(2 * (size_t)ISWF_BLOCK_BYTES, 0, ISWF_MAPPING) == arena.at);
	iswf_fault(page_at(&arena, 300));
	CHECK_EQ(iswf_mask_count(&A->blocks[0].home), ISWF_BLOCK_PAGES);
	CHECK(!iswf_mask_any(&A->blocks[1].home));
	end_ranges();
}

/*
 * Pages that the kernel has just had in swap are refused, too. A job whose blocks all were refused
 * eight times within a moment took 95 s for 6, since each fault waited for others to leave.
 */
static void blocks_that_are_refused_are_tried_a_while_later(void)
{
	begin_calm();
	CHECK(iswf_take(2 * (size_t)ISWF_BLOCK_BYTES, 0, ISWF_MAPPING) == arena.at);
	for (uint32_t page = 0; page < 2 * ISWF_BLOCK_PAGES; page++)
		model[page].owned = true;
	for (uint32_t page = 0; page < 10; page++)
		change(page);
	CHECK(A->blocks[0].queue == ISWF_Q_FILLED);
	now_ns += 1100000000u; /* its first use has ended */
	all_pinned = true;
	for (uint32_t i = 0; i < 8; i++) {
		CHECK(!A->blocks[0].fixed);
		CHECK(iswf_evict(false));
		CHECK(!iswf_evict(false)); /* not at once */
		now_ns += 110000000u;
	}
	all_pinned = false;
	CHECK(A->blocks[0].fixed && !iswf_evict(false));
	A->budget_pages = 0;
	change(ISWF_BLOCK_PAGES); /* nothing can leave for it, so it waits for nothing */
	CHECK_EQ(A->count.room_waits, 0);
	check_books();
	end_ranges();
}

/* What the program never wrote costs neither the device nor the program any memory. */
static void pages_of_zeros_do_not_leave(void)
{
	begin_calm();
	CHECK(iswf_take(ISWF_BLOCK_BYTES, 0, ISWF_MAPPING) == arena.at);
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		model[page].owned = true;
	change(300);
	CHECK(iswf_evict(false) && !iswf_send()); /* the zeros alone: that costs least */
	CHECK_EQ(A->held_pages, 1);
	CHECK(A->blocks[0].queue == ISWF_Q_HOME && arena.present[300]);
	CHECK(leave());
	CHECK_EQ(A->count.pages_out, 1);
	CHECK_EQ(iswf_mask_count(&A->blocks[0].far), 1);
	CHECK_EQ(A->held_pages, 0);
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		look(page);
	check_books();
	end_ranges();
}

/* Each look gave up all that the program was reading: a job took 3.5 times as long. */
static void zeros_that_are_needed_again_are_left_then(void)
{
	begin_calm();
	CHECK(iswf_take(ISWF_BLOCK_BYTES, 0, ISWF_MAPPING) == arena.at);
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		model[page].owned = true;
	for (uint32_t i = 0; i < 2; i++) {
		look(300);
		CHECK_EQ(A->held_pages, ISWF_BLOCK_PAGES);
		CHECK(A->blocks[0].queue == (i == 0 ? ISWF_Q_FILLED : ISWF_Q_HOME));
		if (i == 0)
			CHECK(iswf_evict(false));
	}
	check_books();
	end_ranges();
}

/* Its program may be writing there in order. */
static void zeros_of_a_block_in_its_first_use_are_left(void)
{
	begin_calm();
	A->budget_pages = 2 * 8 * (int64_t)ISWF_BLOCK_PAGES; /* two may be in use */
	CHECK(iswf_take(3 * (size_t)ISWF_BLOCK_BYTES, 0, ISWF_MAPPING) == arena.at);
	for (uint32_t page = 0; page < 3 * ISWF_BLOCK_PAGES; page++)
		model[page].owned = true;
	for (uint32_t block = 0; block < 3; block++) {
		change(block * ISWF_BLOCK_PAGES + 300);
		CHECK_EQ(A->queues[ISWF_Q_FILLED].count, block + 1);
	}
	CHECK(iswf_evict(false));
	CHECK_EQ(iswf_mask_count(&A->blocks[0].home), 1);
	CHECK_EQ(iswf_mask_count(&A->blocks[1].home), ISWF_BLOCK_PAGES);
	/* The first again: no other has left its first use. */
	CHECK(iswf_evict(false));
	CHECK(is_aside(0) && A->queues[ISWF_Q_FILLED].count == 2);
	now_ns += 1100000000u; /* a second later none is in its first use */
	CHECK(iswf_evict(false) && iswf_evict(false));
	CHECK(A->queues[ISWF_Q_FILLED].count == 0 && A->queues[ISWF_Q_HOME].count == 2);
	check_books();
	end_ranges();
}

/* At most two, and none where memory is short; the next first touch takes one. */
static void what_is_ready_serves_the_first_touch(void)
{
	begin_calm();
	CHECK(iswf_take(2 * (size_t)ISWF_BLOCK_BYTES, 0, ISWF_MAPPING) == arena.at);
	CHECK(!iswf_make_ready());
	A->budget_pages = LARGE_PAGES;
	A->held_pages = LARGE_PAGES - ISWF_BLOCK_PAGES + 1;
	CHECK(!iswf_make_ready());
	A->held_pages = 0;
	CHECK(iswf_make_ready() && iswf_make_ready() && !iswf_make_ready());
	iswf_fault(page_at(&arena, 300));
	CHECK_EQ(A->ready_count, 1);
	CHECK_EQ(A->held_pages, ISWF_BLOCK_PAGES);
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		look(page);
	check_books();
	end_ranges();
}

static void take_block(enum iswf_request request)
{
	CHECK(iswf_take(ISWF_BLOCK_BYTES, 0, request) == arena.at);
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++) {
		model[page].owned = true;
		model[page].value = 0;
	}
}

static void give_block(char *at)
{
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++) {
		model[page].owned = false;
		model[page].changes = true;
	}
	if (iswf_size_of(at) != 0)
		iswf_give(at);
	else
		CHECK_EQ(iswf_unmap(at, ISWF_BLOCK_BYTES), 0);
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		model[page].changes = false;
}

/* A block that the program has freed and that is home still: zeros, but for page 300. */
static void begin_freed(void)
{
	begin_calm();
	A->budget_pages = LARGE_PAGES;
	take_block(ISWF_MALLOC);
	change(300);
	give_block(arena.at);
	CHECK_EQ(A->held_pages, ISWF_BLOCK_PAGES);
}

/* The host has a use for it, and the program has shown none. */
static void what_is_freed_leaves_after_a_while(void)
{
	now_ns += 1900000000ull; /* so that no block is freed at time 0 */
	begin_freed();
	CHECK(!iswf_is_stale());
	now_ns += 1900000000ull;
	CHECK(!iswf_is_stale());
	take_block(ISWF_MALLOC);
	give_block(arena.at);
	now_ns += 1900000000ull;
	CHECK(!iswf_is_stale());
	now_ns += 200000000u;
	CHECK(iswf_is_stale() && iswf_evict(true));
	CHECK_EQ(A->held_pages, 0);
	CHECK(!iswf_is_stale());
	take_block(ISWF_MALLOC);
	change(300);
	CHECK(!iswf_evict(true)); /* nothing else leaves for that */
	end_ranges();
}

/* As with libc's heap: the next allocation there costs no fault, and leaves what it held. */
static void what_is_freed_stays_while_there_is_room(void)
{
	uint64_t held;
	uint32_t before = writes;

	begin_freed();
	held = arena.value[300];
	take_block(ISWF_MALLOC);
	CHECK(arena.present[300] && arena.value[300] == held);
	give_block(arena.at);
	for (enum iswf_request request = ISWF_CALLOC; request <= ISWF_MAPPING; request++) {
		take_block(request);
		look(300);
		change(300);
		check_books();
		give_block(arena.at);
		take_block(ISWF_MALLOC);
		change(300);
		give_block(arena.at);
	}
	/* It is the first to leave, unsent, and gives way at once where room is short. */
	CHECK(iswf_evict(false) && !iswf_send());
	CHECK_EQ(writes, before);
	CHECK_EQ(A->held_pages, 0);
	take_block(ISWF_MALLOC);
	change(300);
	A->budget_pages = A->held_pages;
	give_block(arena.at);
	CHECK_EQ(A->held_pages, 0);
	end_ranges();
}

/* What is discarded in parts leaves a table of single pages, beside which none is huge. */
static void a_block_that_went_in_parts_comes_whole(void)
{
	begin_calm();
	A->budget_pages = LARGE_PAGES;
	take_block(ISWF_MALLOC);
	for (uint32_t i = 0; i < 2; i++) {
		change(300);
		CHECK_EQ(A->held_pages, ISWF_BLOCK_PAGES);
		for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page += ISWF_BLOCK_PAGES / 2)
			discard(page, page + ISWF_BLOCK_PAGES / 2);
		CHECK_EQ(A->held_pages, 0);
	}
	check_books();
	end_ranges();
}

/* MADV_FREE behind the agent, and the program has written there since: no mask names the page. */
static void what_the_kernel_kept_does_not_go_with_a_table(void)
{
	begin_calm();
	A->budget_pages = LARGE_PAGES;
	take_block(ISWF_MALLOC);
	change(300);
	discard(0, 300);
	discard(301, ISWF_BLOCK_PAGES);
	iswf_removed(page_at(&arena, 300), page_at(&arena, 301), false, NULL);
	CHECK_EQ(A->held_pages, 0);
	look(10);
	CHECK(arena.present[300] && arena.value[300] == model[300].value);
	end_ranges();
}

/*
 * A discard behind the agent whose page another thread touches before the kernel forgets it: at
 * home, and not there. Who sends it would wait for itself.
 */
static void a_page_that_was_forgotten_late_leaves(void)
{
	begin_calm();
	A->budget_pages = LARGE_PAGES;
	take_block(ISWF_MALLOC);
	change(299);
	change(300);
	CHECK(leave());
	iswf_removed(page_at(&arena, 300), page_at(&arena, 301), false, NULL);
	model[300].value = 0;
	look(299);
	look(300);
	CHECK(arena.present[300]);
	arena.present[300] = false;
	CHECK(leave());
	look(299);
	look(300);
	check_books();
	end_ranges();
}

/* A fork, or mlock of something else in the block: what was freed there is no zeros. */
static void what_is_handed_back_is_cleared_when_it_is_taken(void)
{
	begin_freed();
	hand_back(0);
	take_block(ISWF_CALLOC);
	look(300);
	end_ranges();
}

static void leave_once(void)
{
	CHECK(leave());
}

/* Its pages are the caller's before they are cleared, so they may leave in between. */
static void what_leaves_before_it_is_cleared_is_zeros(void)
{
	begin_freed();
	meanwhile_once = leave_once;
	for (uint32_t page = 0; page < 2 * ISWF_BLOCK_PAGES; page++)
		model[page].owned = true;
	CHECK(iswf_take(2 * (size_t)ISWF_BLOCK_BYTES, 0, ISWF_MALLOC) == arena.at);
	change(300);
	change(ISWF_BLOCK_PAGES + 300);
	for (uint32_t page = 0; page < 2 * ISWF_BLOCK_PAGES; page++)
		model[page].owned = false;
	iswf_give(arena.at);
	CHECK(iswf_take(2 * (size_t)ISWF_BLOCK_BYTES, 0, ISWF_CALLOC) == arena.at);
	CHECK(meanwhile_once == NULL);
	for (uint32_t page = 0; page < 2 * ISWF_BLOCK_PAGES; page++) {
		model[page].owned = true;
		model[page].value = 0;
		look(page);
	}
	end_ranges();
}

/* Locked by a call that the agent does not see, say. */
static void what_cannot_be_cleared_is_not_taken(void)
{
	begin_freed();
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		model[page].changes = true;
	discards_refused = 2; /* and when it is given up, too */
	CHECK(iswf_take(ISWF_BLOCK_BYTES, 0, ISWF_CALLOC) == NULL);
	CHECK_EQ(discards_refused, 0);
	CHECK(iswf_take(ISWF_BLOCK_BYTES, 0, ISWF_MALLOC) != arena.at);
	end_ranges();
}

/* Who had the page could go on, by a handler of SIGBUS. */
static void a_lost_page_is_not_the_next_ones(void)
{
	begin_freed();
	take_block(ISWF_MALLOC);
	change(300);
	CHECK(leave());
	device[0].lost[300] = lossy = true;
	look(300);
	CHECK(arena.poisoned[300]);
	give_block(arena.at);
	take_block(ISWF_MALLOC);
	CHECK(!arena.poisoned[300]);
	end_ranges();
}

static void read_block(uint32_t block, bool upwards)
{
	for (uint32_t i = 0; i < ISWF_BLOCK_PAGES; i++)
		look(block * ISWF_BLOCK_PAGES + (upwards ? i : ISWF_BLOCK_PAGES - 1 - i));
}

/* A page, four, sixteen, sixty-four, and the rest. */
static void a_walk_takes_larger_and_larger_steps(bool upwards)
{
	uint32_t before;

	begin_far();
	A->late = LATE; /* as after touches all over */
	before = reads;
	read_block(2, upwards);
	CHECK_EQ(reads - before, 5);
	check_books();
	end_ranges();
}

static void leave_all(void)
{
	while (iswf_evict(false))
		CHECK(iswf_send());
	CHECK_EQ(A->held_pages, 0);
}

/*
 * Touches of single pages far from each other, of all blocks by turns, as the budget allows; how
 * many of them, from one on, brought a block.
 */
static uint32_t bought_by_turns(uint32_t touches, uint32_t from)
{
	uint32_t bought = 0;

	for (uint32_t i = 0; i < touches; i++) {
		uint32_t block = i % BLOCKS, page = i * 67 % ISWF_BLOCK_PAGES;
		uint32_t before = iswf_mask_count(&A->blocks[block].home);

		A->full_until_ns = UINT64_MAX; /* it does not wait for room */
		if (!arena.present[block * ISWF_BLOCK_PAGES + page])
			iswf_fault(iswf_at(block) + (size_t)page * ISWF_PAGE_BYTES);
		A->full_until_ns = 0;
		if (i >= from)
			bought += iswf_mask_count(&A->blocks[block].home) > before + 1;
		while (A->held_pages > A->budget_pages)
			CHECK(iswf_evict(false) && iswf_send());
	}
	return bought;
}

/*
 * Blocks of which more is wanted soon come whole at their first fault, but for a few; those whose
 * single pages have left a table come by parts from then on, of which the second one has grown.
 */
static void blocks_in_use_come_whole(void)
{
	uint32_t before, wanted;

	begin_far();
	A->budget_pages = LARGE_PAGES;
	for (uint32_t i = 0; i < 16; i++) {
		before = reads;
		wanted = A->blocks[i % BLOCKS].tabled ? 2 : 1;
		for (uint32_t j = 0; j < 16; j++)
			iswf_fault(iswf_at(i % BLOCKS) +
				   (size_t)j * 40 * ISWF_PAGE_BYTES % ISWF_BLOCK_BYTES);
		CHECK_EQ(reads - before, i % 8 == 7 ? 6 + wanted : wanted);
		leave_all();
	}
	check_books();
	end_ranges();
}

/* As long as nobody wants most of their pages: then they are whole, and huge, again. */
static void blocks_of_which_little_is_wanted_come_by_parts(void)
{
	begin_far();
	A->budget_pages = LARGE_PAGES;
	A->unused = UNUSED;
	iswf_fault(iswf_at(0) + 100 * ISWF_PAGE_BYTES);
	CHECK_EQ(iswf_mask_count(&A->blocks[0].home), 80);
	CHECK(iswf_has(&A->blocks[0].home, 100) && iswf_has(&A->blocks[0].home, 179));
	leave_all();
	CHECK(A->unused < UNUSED); /* that was a sixth of it */
	for (uint32_t i = 0; i < 32; i++) {
		read_block(1 + i % 2, true);
		leave_all();
	}
	iswf_fault(iswf_at(3) + 100 * ISWF_PAGE_BYTES);
	CHECK_EQ(iswf_mask_count(&A->blocks[3].home), ISWF_BLOCK_PAGES);
	check_books();
	end_ranges();
}

/* Where the budget has no room for the blocks that are touched, pages come one by one. */
static void scattered_pages_come_one_by_one(void)
{
	begin_far();
	A->budget_pages = PAGES / 2;
	CHECK(bought_by_turns(1600, 1200) <= 4); /* of blocks that were bought before */
	/* ... until more of each is wanted soon. */
	A->budget_pages = LARGE_PAGES;
	leave_all();
	(void)bought_by_turns(200, 0);
	leave_all();
	CHECK(bought_by_turns(BLOCKS, 0) >= BLOCKS - 1);
	check_books();
	end_ranges();
}

/* Touches single pages all over the blocks, as the budget allows, each so long after the one
 * before; true once far memory pauses. */
static bool strays_pause(uint32_t touches, uint32_t apart_ns)
{
	uint64_t pauses = A->count.pauses;

	for (uint32_t i = 0; i < touches && A->count.pauses == pauses; i++) {
		uint32_t page =
			(i % BLOCKS) * ISWF_BLOCK_PAGES + i / BLOCKS * 67 % ISWF_BLOCK_PAGES;

		now_ns += apart_ns;
		A->full_until_ns = UINT64_MAX; /* it does not wait for room */
		if (!arena.present[page])
			iswf_fault(arena.at + (size_t)page * ISWF_PAGE_BYTES);
		A->full_until_ns = 0;
		while (A->held_pages > A->budget_pages && A->count.pauses == pauses)
			CHECK(iswf_evict(false) && iswf_send());
	}
	return A->count.pauses > pauses;
}

#define ENOUGH 20000u /* touches */

static uint32_t far_page(void)
{
	uint32_t page = 0;

	while (!iswf_has(&A->blocks[page / ISWF_BLOCK_PAGES].far, page % ISWF_BLOCK_PAGES))
		CHECK(++page < PAGES);
	return page;
}

/* Where single pages are all that is wanted, the kernel swaps, until little comes back. */
static void far_memory_pauses_where_touches_are_strays(void)
{
	uint64_t began;
	uint32_t page;

	begin_far();
	A->budget_pages = PAGES / 2;
	CHECK(!strays_pause(2000, 0) && strays_pause(ENOUGH, 0));
	began = now_ns;
	page = far_page();
	CHECK(!iswf_evict(false)); /* though more is home than may be, soon */
	look(page);
	CHECK(!iswf_mask_any(&A->blocks[page / ISWF_BLOCK_PAGES].far));
	iswf_pause_look(began + 900000000u, began + 100000000u);
	CHECK(iswf_is_paused(began + 900000000u)); /* it was not calm for a second */
	iswf_pause_look(began + 1200000000u, began + 100000000u);
	CHECK(!iswf_is_paused(began + 1200000000u));
	CHECK(A->count.pause_ns > 1190000000u && A->count.pause_ns < 1210000000u);
	check_books();
	end_ranges();
}

/* Nor does what was aside leave, or anybody wait for room, until all that may be home fits again.
 */
static void a_pause_sends_nothing_and_nobody_waits(void)
{
	uint64_t pages_out, waits;

	begin_far();
	A->budget_pages = PAGES / 2;
	CHECK(strays_pause(ENOUGH, 0));
	A->paused_until_ns = 0;
	CHECK(iswf_evict(false) && A->queues[ISWF_Q_ASIDE].count == 1);
	A->paused_until_ns = now_ns + 1000000000u;
	pages_out = A->count.pages_out;
	waits = A->count.room_waits;
	while (iswf_work_once())
		;
	CHECK_EQ(A->queues[ISWF_Q_ASIDE].count, 1);
	for (uint32_t page = 0; page < PAGES; page++)
		look(page);
	CHECK(A->held_pages > A->budget_pages);
	A->paused_until_ns = now_ns;
	iswf_pause_look(now_ns, 0);
	(void)iswf_take(ISWF_BLOCK_BYTES, 0, ISWF_MAPPING);
	CHECK_EQ(A->count.room_waits, waits);
	CHECK_EQ(A->count.pages_out, pages_out);
	while (A->held_pages > A->budget_pages)
		CHECK(iswf_evict(false) && iswf_send());
	CHECK(A->overfull);
	iswf_pause_look(now_ns, 0);
	CHECK(!A->overfull);
	check_books();
	end_ranges();
}

/* What begins again soon lasts twice as long; what begins again later, as long as the first. */
static void a_pause_that_comes_again_soon_is_longer(void)
{
	begin_far();
	A->budget_pages = PAGES / 2;
	CHECK(strays_pause(ENOUGH, 0));
	CHECK_EQ(A->pause_ns, 8000000000u);
	for (uint32_t i = 0; i < 4; i++) { /* the kernel brings pages back all the time */
		now_ns += 2000000000u;
		iswf_pause_look(now_ns, now_ns - 40000000u);
	}
	CHECK(!iswf_is_paused(now_ns));
	CHECK(A->count.pause_ns > 7990000000u && A->count.pause_ns <= 8000000000u);
	CHECK(strays_pause(ENOUGH, 0));
	CHECK_EQ(A->pause_ns, 16000000000u);
	now_ns = A->paused_until_ns + 2 * A->pause_ns;
	CHECK(strays_pause(ENOUGH, 0));
	CHECK_EQ(A->pause_ns, 8000000000u);
	for (uint32_t i = 0; i < 5; i++) {
		now_ns = A->paused_until_ns;
		CHECK(strays_pause(ENOUGH, 0));
	}
	CHECK_EQ(A->pause_ns, 128000000000u); /* no longer ones */
	end_ranges();
}

/* Few touches a second, or for all that is away; no room in swap; other processes with far memory,
 * from the first or later.
 */
static void far_memory_does_not_pause_where_swap_would_not_help(void)
{
	begin_far();
	A->budget_pages = PAGES / 2;
	CHECK(!strays_pause(ENOUGH, 2000000u));
	A->count.pages_away += ENOUGH; /* of other blocks: much would come home */
	CHECK(!strays_pause(ENOUGH / 4, 0));
	A->count.pages_away -= ENOUGH;
	swap_pages = 32 * ISWF_BLOCK_PAGES + PAGES / 2 - 8; /* less than is away and some */
	CHECK(!strays_pause(ENOUGH, 0));
	swap_pages += PAGES;
	A->others = 1;
	CHECK(!strays_pause(ENOUGH, 0));
	A->others = 0;
	A->swap_is_limited = true;
	CHECK(!strays_pause(ENOUGH, 0));
	A->swap_is_limited = false;
	CHECK(strays_pause(ENOUGH, 0));
	iswf_pause_look(A->pause_began_ns - 1000, 0); /* a clock read before the pause */
	iswf_pause_look(now_ns, now_ns);
	CHECK(iswf_is_paused(now_ns));
	A->others = 1;
	iswf_pause_look(now_ns, now_ns);
	CHECK(!iswf_is_paused(now_ns));
	A->others = 0;
	CHECK(strays_pause(ENOUGH, 0));
	A->budget_pages = 0;
	CHECK(A->overfull);
	swap_pages = 32 * ISWF_BLOCK_PAGES - 1; /* others have filled it */
	iswf_pause_look(now_ns, now_ns);
	CHECK(!iswf_is_paused(now_ns) && !A->overfull); /* who wants room waits for it again */
	end_ranges();
}

/* A program that walks through its memory, or takes all of it in turn, is never left to swap. */
static void far_memory_pauses_for_no_walk(void)
{
	begin_far();
	A->budget_pages = PAGES / 2;
	A->late = LATE; /* as after touches all over */
	for (uint32_t i = 0; i < 40 * BLOCKS; i++) {
		A->full_until_ns = UINT64_MAX;
		read_block(i % BLOCKS, i / BLOCKS % 2 == 0);
		A->full_until_ns = 0;
		while (A->held_pages > A->budget_pages)
			CHECK(iswf_evict(false) && iswf_send());
	}
	CHECK_EQ(A->count.pauses, 0);
	CHECK(A->strays_net < 100);
	end_ranges();
}

/* In either direction the third block is there before its first fault. */
static void the_next_block_of_a_row_comes_before_its_fault(bool upwards)
{
	uint32_t order[BLOCKS], before;

	begin_far();
	for (uint32_t i = 0; i < BLOCKS; i++)
		order[i] = upwards ? i : BLOCKS - 1 - i;
	read_block(order[0], upwards);
	CHECK(!iswf_ahead()); /* one block is no row */
	read_block(order[1], upwards);
	for (uint32_t i = 2; i < BLOCKS; i++) {
		CHECK(iswf_ahead() && is_aside(order[i]));
		check_books();
		before = reads;
		read_block(order[i], upwards);
		CHECK_EQ(reads, before);
		CHECK(!is_aside(order[i]));
	}
	CHECK(!iswf_ahead()); /* there is none behind the last */
	CHECK_EQ(A->count.blocks_ahead, BLOCKS - 2);
	CHECK_EQ(A->count.blocks_ahead_used, BLOCKS - 2);
	check_books();
	end_ranges();
}

static void look_all(uint32_t block)
{
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		look(block * ISWF_BLOCK_PAGES + page);
}

/* How many of the blocks, touched in turn, are not home, as the budget leaves them. */
static uint32_t missed_in_turn(uint32_t first, uint32_t end)
{
	uint32_t missed = 0;

	for (uint32_t block = first; block < end; block++) {
		missed += !arena.present[block * ISWF_BLOCK_PAGES];
		A->full_until_ns = UINT64_MAX; /* it does not wait for room */
		look_all(block);
		A->full_until_ns = 0;
		while (A->held_pages > A->budget_pages)
			CHECK(iswf_evict(false) && iswf_send());
	}
	return missed;
}

/* First in, first out would miss each block in each turn. */
static void of_what_is_read_in_turn_a_part_stays(void)
{
	uint32_t missed = 0;

	begin_far();
	A->budget_pages = PAGES / 2;
	(void)missed_in_turn(0, BLOCKS);
	for (uint32_t turn = 0; turn < 8; turn++)
		missed += missed_in_turn(0, BLOCKS);
	CHECK(missed <= 8 * BLOCKS * 3 / 4);
	check_books();
	end_ranges();
}

/* What stayed meanwhile is of no use then, nor are the last of those that were read in turn. */
static void what_fits_after_that_comes_home(uint32_t first, uint32_t end)
{
	begin_far();
	A->budget_pages = (int64_t)(end - first) * ISWF_BLOCK_PAGES;
	for (uint32_t turn = 0; turn < 8; turn++)
		(void)missed_in_turn(0, BLOCKS);
	for (uint32_t turn = 0; turn < 8; turn++)
		(void)missed_in_turn(first, end);
	CHECK_EQ(missed_in_turn(first, end), 0);
	check_books();
	end_ranges();
}

static void the_last_that_were_read_in_turn_leave(void)
{
	begin_far();
	A->budget_pages = PAGES - ISWF_BLOCK_PAGES;
	look_all(0);
	A->blocks[0].looped = true;
	iswf_fault(iswf_at(0)); /* so that it is sorted */
	CHECK_EQ(A->queues[ISWF_Q_LOOPED].count, 1);
	for (uint32_t turn = 0; turn < 4; turn++)
		(void)missed_in_turn(1, BLOCKS);
	CHECK_EQ(missed_in_turn(1, BLOCKS), 0);
	end_ranges();
}

/* A block that comes back late once, sooner the second time, or soon, is not of those. */
static void what_comes_back_late_twice_is_read_in_turn(void)
{
	struct iswf_block *b;

	begin_far();
	A->budget_pages = PAGES - ISWF_BLOCK_PAGES;
	for (uint32_t block = 0; block < BLOCKS - 1; block++)
		look_all(block);
	b = &A->blocks[0];
	b->away = 0;
	for (uint32_t i = 0; i < 5; i++) {
		static const uint32_t away[] = {9, 30, 20, 1, 1};

		while (!iswf_mask_any(&b->far)) {
			for (uint32_t block = 1; block < BLOCKS - 1; block++)
				A->blocks[block].claimed = true;
			CHECK(leave());
			for (uint32_t block = 1; block < BLOCKS - 1; block++)
				A->blocks[block].claimed = false;
		}
		A->left_count = b->left_at + away[i];
		look_all(0);
		CHECK_EQ(b->queue, i == 2 ? ISWF_Q_LOOPED : ISWF_Q_HOME);
	}
	check_books();
	end_ranges();
}

static void read_ahead_needs_room_and_is_given_up_unsent(void)
{
	uint32_t before;

	begin_far();
	read_block(0, true);
	read_block(1, true);
	A->budget_pages = A->held_pages + ISWF_BLOCK_PAGES - 1;
	CHECK(!iswf_ahead() && !is_aside(2));
	A->budget_pages = PAGES;
	read_block(2, true);
	CHECK(iswf_ahead() && is_aside(3));
	before = writes;
	A->left_count += 100;
	CHECK(iswf_send() && !is_aside(3)); /* first of what lies aside */
	CHECK_EQ(writes, before);
	CHECK(A->blocks[3].left_at < 100); /* it was away all the time */
	CHECK_EQ(A->blocks[3].away, 0);
	check_books();
	read_block(3, true);
	CHECK_EQ(A->count.blocks_ahead, 1);
	CHECK_EQ(A->count.blocks_ahead_used, 0);
	end_ranges();
}

/* Two blocks of two rows lie aside. They are excused, but leave no room for a third. */
static void what_came_ahead_leaves_room_for_a_fault(void)
{
	begin_far();
	read_block(0, true);
	read_block(1, true);
	CHECK(iswf_ahead() && is_aside(2));
	read_block(5, false);
	read_block(4, false);
	CHECK(iswf_ahead() && is_aside(3));
	A->budget_pages = A->held_pages + ISWF_BLOCK_PAGES;
	CHECK(!iswf_is_tight());
	A->budget_pages--;
	CHECK(iswf_is_tight());
	end_ranges();
}

/* ------------------------------------------------------------------- pages that came */

/* The block comes, and what the program does then leaves: how many pages were sent for it. */
static uint64_t send_after(void (*program)(void))
{
	uint64_t before;

	look_all(0);
	program();
	before = A->count.pages_out;
	CHECK(leave());
	CHECK_EQ(iswf_mask_count(&A->blocks[0].far), ISWF_BLOCK_PAGES);
	check_books();
	return A->count.pages_out - before;
}

static void change_none(void)
{
}

static void change_two_far_apart(void)
{
	change(7);
	change(300);
}

static void change_two_near(void)
{
	change(7);
	change(20);
}

static void lose_one(void)
{
	device[0].lost[100] = true;
}

static void discard_some(void)
{
	discard(7, 8);
	change(7);
}

static void what_was_only_read_leaves_unsent(void)
{
	begin_far();
	writes = confirms = 0;
	CHECK_EQ(send_after(change_none), 0);
	CHECK_EQ(writes, 0);
	CHECK_EQ(confirms, 1);
	CHECK_EQ(send_after(change_two_far_apart), 2);
	CHECK_EQ(writes, 2);
	CHECK_EQ(send_after(change_two_near), 14); /* by one request */
	CHECK_EQ(writes, 3);
	CHECK_EQ(send_after(discard_some), 1);
	look_all(0);
	end_ranges();
}

/* A page alone, beside which the rest is far. */
static void what_came_by_pages_leaves_unsent(void)
{
	begin_far();
	A->late = LATE;
	look(100);
	look(200);
	CHECK(iswf_mask_count(&A->blocks[0].home) == 2);
	writes = 0;
	CHECK(leave());
	CHECK_EQ(writes, 0);
	CHECK_EQ(A->held_pages, 0);
	look_all(0);
	end_ranges();
}

/* F15: what is home may be the last copy. */
static void the_last_copy_is_sent(void)
{
	begin_far();
	CHECK_EQ(send_after(lose_one), ISWF_BLOCK_PAGES);
	CHECK_EQ(A->count.pages_lost, 0);
	look_all(0);
	CHECK_EQ(A->count.pages_lost, 0);
	end_ranges();
}

/* Its donor may have gone since it was brought. */
static void the_last_copy_that_came_ahead_is_sent(void)
{
	begin_far();
	read_block(0, true);
	read_block(1, true);
	CHECK(iswf_ahead() && is_aside(2));
	device[2].lost[100] = true;
	CHECK(iswf_send() && !is_aside(2));
	look_all(2);
	CHECK_EQ(A->count.pages_lost, 0);
	end_ranges();
}

/* Nobody knows what the device has of a page after a write that failed. */
static void what_was_half_written_is_not_known(void)
{
	uint64_t before;

	begin_far();
	look_all(0);
	before = model[7].value;
	change(7);
	fails_once = true;
	CHECK(iswf_evict(false) && iswf_send());
	CHECK(iswf_has(&A->blocks[0].home, 7) && !iswf_has(&A->blocks[0].known, 7));
	now_ns += 2000000000;
	arena.value[7] = model[7].value = before;
	CHECK(leave());
	CHECK_EQ(device[0].value[7], before);
	look_all(0);
	end_ranges();
}

/* What is left of a mapping is one, too: who unmapped a part of it may use the rest for anything.
 */
static void parts_of_mappings_are_no_allocations(void)
{
	char *at;

	begin();
	at = iswf_take(8 * ISWF_PAGE_BYTES, 0, ISWF_MAPPING);
	CHECK(at != NULL);
	for (uint32_t page = 0; page < 8; page++)
		model[page].changes = true;
	CHECK_EQ(iswf_unmap(at + 2 * ISWF_PAGE_BYTES, ISWF_PAGE_BYTES), 0);
	CHECK_EQ(iswf_size_of_mapping(at), 2);
	CHECK_EQ(iswf_size_of_mapping(at + 3 * ISWF_PAGE_BYTES), 5);
	CHECK(iswf_resize(at + 3 * ISWF_PAGE_BYTES, 4 * ISWF_PAGE_BYTES));
	CHECK_EQ(iswf_size_of_mapping(at + 3 * ISWF_PAGE_BYTES), 4);
	CHECK_EQ(iswf_size_of(at), 0);
	CHECK_EQ(iswf_size_of(at + 3 * ISWF_PAGE_BYTES), 0);
	end_ranges();
}

/* ------------------------------------------------------------------- watching */

static char *take(uint32_t blocks, enum iswf_request request)
{
	char *at = iswf_take((size_t)blocks * ISWF_BLOCK_BYTES, 0, request);
	uint32_t first;

	CHECK(at != NULL && range_of(at, &first) == &arena);
	for (uint32_t page = first; page < first + blocks * ISWF_BLOCK_PAGES; page++) {
		model[page].owned = true;
		model[page].value = 0;
		model[page].any = request == ISWF_MALLOC;
	}
	return at;
}

static void give(char *at, uint32_t blocks)
{
	uint32_t first;

	CHECK(range_of(at, &first) == &arena);
	iswf_give(at);
	for (uint32_t page = first; page < first + blocks * ISWF_BLOCK_PAGES; page++)
		model[page].owned = false;
}

static void start_watching(void)
{
	A->scarce = true;
	CHECK(iswf_watch());
	CHECK(A->watched && !iswf_watch());
	check_books();
}

/* Of the third block half is touched, of the fourth nothing. */
static void only_what_is_there_is_home_once_it_is_watched(void)
{
	begin_calm();
	unwatch();
	CHECK(take(4, ISWF_CALLOC) == arena.at);
	for (uint32_t page = 0; page < 5 * ISWF_BLOCK_PAGES / 2; page++)
		change(page);
	CHECK_EQ(A->count.faults, 0);
	CHECK(!iswf_watch() && !iswf_evict(false) && !iswf_make_ready());
	start_watching();
	CHECK_EQ(A->held_pages, 3 * ISWF_BLOCK_PAGES);
	CHECK(!iswf_mask_any(&A->blocks[3].home));
	look(3 * ISWF_BLOCK_PAGES);
	CHECK_EQ(A->count.faults, 1);
	for (uint32_t block = 0; block < 4; block++)
		look_all(block);
	end_ranges();
}

static void what_is_freed_unwatched_is_zeros_when_it_is_taken_so(void)
{
	char *at;

	begin_calm();
	unwatch();
	at = take(2, ISWF_MALLOC);
	for (uint32_t page = 0; page < 2 * ISWF_BLOCK_PAGES; page++)
		change(page);
	give(at, 2);
	CHECK(arena.present[0]); /* for the next one */
	CHECK(take(2, ISWF_CALLOC) == at);
	look_all(0);
	discard(10, 20);
	change(12); /* unseen */
	discard(10, 20);
	look(12);
	end_ranges();
}

/* Also where another thread is just freeing it, or giving it up. */
static void give_up_another(void)
{
	CHECK(!iswf_give_up_stale());
}

static void what_was_freed_long_ago_is_given_up_once(void)
{
	char *at;

	begin_calm();
	unwatch();
	A->budget_pages = LARGE_PAGES;
	at = take(1, ISWF_MALLOC);
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		change(page);
	give(at, 1);
	CHECK(!iswf_give_up_stale());
	now_ns += 3000000000u;
	meanwhile_once = give_up_another;
	CHECK(iswf_give_up_stale() && meanwhile_once == NULL);
	CHECK(!arena.present[0]);
	CHECK_EQ(A->held_pages, 0);
	CHECK(take(1, ISWF_MALLOC) == at && take(1, ISWF_MALLOC) != at);
	end_ranges();
}

/* Something else is mapped in the first, which the program did by a call that is not seen. */
static void what_cannot_be_watched_stays_the_kernels(void)
{
	begin_calm();
	unwatch();
	(void)take(2, ISWF_MAPPING);
	for (uint32_t page = 0; page < 2 * ISWF_BLOCK_PAGES; page++)
		change(page);
	watch_refused = 0;
	start_watching();
	watch_refused = BLOCKS;
	CHECK(A->blocks[0].left && !A->blocks[1].left);
	CHECK_EQ(A->count.handed_back[ISWF_WHY_FIXED], ISWF_BLOCK_PAGES);
	CHECK(leave() && !leave());
	look_all(0);
	look_all(1);
	/* What was never used is in one part, and is given to nobody. */
	end_ranges();
	begin_calm();
	unwatch();
	(void)take(1, ISWF_MALLOC);
	watch_refused = 3;
	start_watching();
	watch_refused = BLOCKS;
	CHECK(iswf_take(ISWF_BLOCK_BYTES, 0, ISWF_MALLOC) == NULL);
	end_ranges();
}

/* Behind an allocation's end: memory of the next one, which is discarded as any other. */
static void the_rest_of_a_huge_page_is_home_once_it_is_watched(void)
{
	char *at;

	begin_calm();
	unwatch();
	(void)take(1, ISWF_MALLOC);
	change(0);
	CHECK(iswf_resize(arena.at, ISWF_BLOCK_BYTES / 2)); /* else the next one begins a block */
	for (uint32_t page = ISWF_BLOCK_PAGES / 2; page < ISWF_BLOCK_PAGES; page++)
		model[page].owned = false;
	for (uint32_t page = 0; page < ISWF_BLOCK_PAGES; page++)
		arena.present[page] = true; /* huge */
	start_watching();
	CHECK_EQ(A->held_pages, ISWF_BLOCK_PAGES);
	at = iswf_take(ISWF_BLOCK_BYTES / 2, 0, ISWF_MALLOC);
	CHECK(at == page_at(&arena, ISWF_BLOCK_PAGES / 2));
	for (uint32_t page = ISWF_BLOCK_PAGES / 2; page < ISWF_BLOCK_PAGES; page++) {
		model[page].owned = true;
		change(page);
	}
	CHECK_EQ(A->count.faults, 0);
	discard(ISWF_BLOCK_PAGES / 2, ISWF_BLOCK_PAGES);
	look(ISWF_BLOCK_PAGES - 1);
	end_ranges();
}

/* The rest of the second block's huge page is taken, written and discarded while the first one is
 * looked at. */
static void use_the_rest(void)
{
	uint32_t first = 3 * ISWF_BLOCK_PAGES / 2;

	CHECK(A->watched &&
	      iswf_take(ISWF_BLOCK_BYTES / 2, 0, ISWF_MALLOC) == page_at(&arena, first));
	for (uint32_t page = first; page < 2 * ISWF_BLOCK_PAGES; page++) {
		model[page].owned = true;
		change(page);
	}
	discard(first, 2 * ISWF_BLOCK_PAGES);
}

static void what_was_not_looked_at_yet_is_discarded(void)
{
	begin_calm();
	unwatch();
	CHECK(take(2, ISWF_MALLOC) == arena.at);
	change(0);
	change(ISWF_BLOCK_PAGES);
	CHECK(iswf_resize(arena.at, 3 * ISWF_BLOCK_BYTES / 2));
	for (uint32_t page = 3 * ISWF_BLOCK_PAGES / 2; page < 2 * ISWF_BLOCK_PAGES; page++)
		model[page].owned = false;
	/* As if nothing ever had it. */
	A->blocks[1].home = iswf_mask_range(0, ISWF_BLOCK_PAGES / 2);
	A->held_pages -= ISWF_BLOCK_PAGES / 2;
	there_once = use_the_rest;
	start_watching();
	CHECK(there_once == NULL);
	look_all(1);
	end_ranges();
}

/* Of a block whose only page in use is unmapped. */
static void the_rest_of_a_huge_page_is_given_up_with_its_part(void)
{
	size_t bytes = ISWF_BLOCK_BYTES + ISWF_PAGE_BYTES;

	begin_calm();
	unwatch();
	CHECK(iswf_take(bytes, 0, ISWF_MAPPING) == arena.at);
	model[ISWF_BLOCK_PAGES].owned = true;
	change(ISWF_BLOCK_PAGES);
	CHECK(arena.present[ISWF_BLOCK_PAGES + 100]);
	model[ISWF_BLOCK_PAGES].changes = true;
	CHECK_EQ(iswf_unmap(arena.at, bytes), 0);
	model[ISWF_BLOCK_PAGES].owned = model[ISWF_BLOCK_PAGES].changes = false;
	now_ns += 3000000000u;
	while (iswf_give_up_stale())
		;
	CHECK(!arena.present[ISWF_BLOCK_PAGES + 100]);
	CHECK_EQ(A->held_pages, 0);
	end_ranges();
}

/* The kernel goes on with a discard once it was heard, so the pages may be there for a while. */
static void tell_of_a_discard(void)
{
	iswf_removed(page_at(&arena, ISWF_BLOCK_PAGES), page_at(&arena, 2 * ISWF_BLOCK_PAGES),
		     false, NULL);
}

static void what_is_being_discarded_is_not_home_once_it_is_watched(void)
{
	begin_calm();
	unwatch();
	(void)take(2, ISWF_MALLOC);
	change(0);
	change(ISWF_BLOCK_PAGES);
	there_once = tell_of_a_discard;
	A->scarce = true;
	CHECK(iswf_watch() && there_once == NULL);
	CHECK(!iswf_mask_any(&A->blocks[1].home) && A->blocks[1].unsure);
	end_ranges();
}

static void begin_watching(void)
{
	A->watched = true;
	memset(left, 0, sizeof(left));
}

static void what_is_registered_meanwhile_is_handed_back_again(void)
{
	begin_calm();
	unwatch();
	(void)take(1, ISWF_MALLOC);
	change(0);
	left_once = begin_watching;
	hand_back(0);
	CHECK(left_once == NULL && A->blocks[0].left && left[0]);
	end_ranges();
}

static void what_was_handed_back_is_not_watched(void)
{
	begin_calm();
	unwatch();
	(void)take(2, ISWF_MALLOC);
	change(5);
	hand_back(0);
	CHECK_EQ(A->count.handed_back[ISWF_WHY_FORK], ISWF_BLOCK_PAGES); /* of two blocks */
	start_watching();
	CHECK(A->blocks[0].left && left[0] && !left[1]);
	look(5);
	end_ranges();
}

int main(int argc, char **argv)
{
	uint64_t first = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
	uint64_t seeds = argc > 1 ? 1 : 60;
	uint32_t steps = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 2000;

	iswf_clocks_init();
	random_state = 88172645463325252ull;
	the_next_block_of_a_row_comes_before_its_fault(true);
	the_next_block_of_a_row_comes_before_its_fault(false);
	read_ahead_needs_room_and_is_given_up_unsent();
	what_came_ahead_leaves_room_for_a_fault();
	of_what_is_read_in_turn_a_part_stays();
	for (uint32_t first = 0; first < BLOCKS; first++)
		for (uint32_t end = first + 2; end <= BLOCKS; end++)
			what_fits_after_that_comes_home(first, end);
	the_last_that_were_read_in_turn_leave();
	what_comes_back_late_twice_is_read_in_turn();
	what_was_only_read_leaves_unsent();
	what_came_by_pages_leaves_unsent();
	the_last_copy_is_sent();
	the_last_copy_that_came_ahead_is_sent();
	what_was_half_written_is_not_known();
	parts_of_mappings_are_no_allocations();
	the_first_touch_of_a_block_makes_all_of_it();
	what_is_ready_serves_the_first_touch();
	what_is_freed_leaves_after_a_while();
	what_is_freed_stays_while_there_is_room();
	a_block_that_went_in_parts_comes_whole();
	what_the_kernel_kept_does_not_go_with_a_table();
	what_is_handed_back_is_cleared_when_it_is_taken();
	a_page_that_was_forgotten_late_leaves();
	what_leaves_before_it_is_cleared_is_zeros();
	what_cannot_be_cleared_is_not_taken();
	a_lost_page_is_not_the_next_ones();
	a_walk_takes_larger_and_larger_steps(true);
	a_walk_takes_larger_and_larger_steps(false);
	blocks_in_use_come_whole();
	blocks_of_which_little_is_wanted_come_by_parts();
	scattered_pages_come_one_by_one();
	far_memory_pauses_where_touches_are_strays();
	a_pause_sends_nothing_and_nobody_waits();
	a_pause_that_comes_again_soon_is_longer();
	far_memory_does_not_pause_where_swap_would_not_help();
	far_memory_pauses_for_no_walk();
	zeros_that_are_needed_again_are_left_then();
	zeros_of_a_block_in_its_first_use_are_left();
	blocks_that_are_refused_are_tried_a_while_later();
	pages_of_zeros_do_not_leave();
	only_what_is_there_is_home_once_it_is_watched();
	what_is_freed_unwatched_is_zeros_when_it_is_taken_so();
	what_was_freed_long_ago_is_given_up_once();
	what_cannot_be_watched_stays_the_kernels();
	what_was_handed_back_is_not_watched();
	the_rest_of_a_huge_page_is_home_once_it_is_watched();
	what_was_not_looked_at_yet_is_discarded();
	the_rest_of_a_huge_page_is_given_up_with_its_part();
	what_is_being_discarded_is_not_home_once_it_is_watched();
	what_is_registered_meanwhile_is_handed_back_again();
	for (uint64_t seed = first; seed < first + seeds; seed++) {
		printf("seed %llu\n", (unsigned long long)seed);
		fflush(stdout);
		run(seed, steps);
	}
	return 0;
}
