/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The handlers of blocks. Each claims the block it works on, works without the lock, says in the
 * masks what it did, and releases the block. A fault in a claimed block marks it as wanted: its
 * release wakes the thread, which faults again if it has to.
 */
#include <errno.h>
#include <string.h>

#include "far/agent.h"

/* What fetching a whole block costs, in small fetches: after so many of them it is cheaper. */
#define SMALL_FETCHES_MAX 32u
#define WINDOW_GROWTH     4u
#define FILL_PAGES        16u
/* A block of which this much is far comes back as a huge page. */
#define WHOLE_PAGES_MIN 448u
/* Moves out in a row that may fail (pages pinned or shared) before a block is left at home. */
#define REFUSALS_MAX 8u
#define FULL_NS      1000000000ull /* eviction rests so long when the device has no room */
#define ROOM_NS_MAX  200000000ull  /* longest wait for memory: then the kernel swaps */
/* A read that fails as a whole is tried by pages so long before their bytes count as lost. */
#define LOST_NS 30000000000ull

struct iswf_agent iswf_agent = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.released = PTHREAD_COND_INITIALIZER,
	.room = PTHREAD_COND_INITIALIZER,
	.work = PTHREAD_COND_INITIALIZER,
};

#define A (&iswf_agent)

static void count(atomic_uint_fast64_t *counter, uint64_t by)
{
	atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

/* ------------------------------------------------------------------- masks */

uint32_t iswf_mask_count(const struct iswf_mask *mask)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < ISWF_WORDS; i++)
		n += (uint32_t)__builtin_popcountll(mask->word[i]);
	return n;
}

bool iswf_mask_any(const struct iswf_mask *mask)
{
	uint64_t any = 0;

	for (uint32_t i = 0; i < ISWF_WORDS; i++)
		any |= mask->word[i];
	return any != 0;
}

struct iswf_mask iswf_mask_range(uint32_t first, uint32_t end)
{
	struct iswf_mask mask;

	for (uint32_t i = 0; i < ISWF_WORDS; i++) {
		uint32_t from = i * 64, to = from + 64;
		uint64_t word = ~0ull;

		if (first >= to || end <= from) {
			mask.word[i] = 0;
			continue;
		}
		if (first > from)
			word &= ~0ull << (first - from);
		if (end < to)
			word &= ~0ull >> (to - end);
		mask.word[i] = word;
	}
	return mask;
}

struct iswf_mask iswf_mask_and(const struct iswf_mask *a, const struct iswf_mask *b)
{
	struct iswf_mask both;

	for (uint32_t i = 0; i < ISWF_WORDS; i++)
		both.word[i] = a->word[i] & b->word[i];
	return both;
}

struct iswf_mask iswf_mask_without(const struct iswf_mask *a, const struct iswf_mask *b)
{
	struct iswf_mask rest;

	for (uint32_t i = 0; i < ISWF_WORDS; i++)
		rest.word[i] = a->word[i] & ~b->word[i];
	return rest;
}

void iswf_mask_add(struct iswf_mask *mask, const struct iswf_mask *more)
{
	for (uint32_t i = 0; i < ISWF_WORDS; i++)
		mask->word[i] |= more->word[i];
}

void iswf_mask_take(struct iswf_mask *mask, const struct iswf_mask *less)
{
	*mask = iswf_mask_without(mask, less);
}

uint32_t iswf_mask_run(const struct iswf_mask *mask, uint32_t *first)
{
	uint32_t page = *first, end;

	while (page < ISWF_BLOCK_PAGES && !iswf_has(mask, page))
		page++;
	for (end = page; end < ISWF_BLOCK_PAGES && iswf_has(mask, end); end++)
		;
	*first = page;
	return end - page;
}

/* ------------------------------------------------------------ queues; lock held */

static void queue_remove(uint32_t block)
{
	struct iswf_block *b = &A->blocks[block];
	struct iswf_queue *queue = &A->queues[b->queue];

	if (b->queue == ISWF_Q_NONE)
		return;
	if (b->prev != ISWF_NONE)
		A->blocks[b->prev].next = b->next;
	else
		queue->head = b->next;
	if (b->next != ISWF_NONE)
		A->blocks[b->next].prev = b->prev;
	else
		queue->tail = b->prev;
	queue->count--;
	b->queue = ISWF_Q_NONE;
}

static void queue_add(enum iswf_queue_name name, uint32_t block)
{
	struct iswf_block *b = &A->blocks[block];
	struct iswf_queue *queue = &A->queues[name];

	queue_remove(block);
	if (queue->count == 0)
		queue->head = queue->tail = ISWF_NONE;
	b->queue = (uint8_t)name;
	b->prev = queue->tail;
	b->next = ISWF_NONE;
	if (queue->tail != ISWF_NONE)
		A->blocks[queue->tail].next = block;
	else
		queue->head = block;
	queue->tail = block;
	queue->count++;
}

/* ------------------------------------------------------------ claims; lock held */

static struct iswf_block *claim(uint32_t block)
{
	struct iswf_block *b = &A->blocks[block];

	while (b->claimed)
		pthread_cond_wait(&A->released, &A->lock);
	b->claimed = true;
	return b;
}

static bool is_empty(const struct iswf_block *b)
{
	return !iswf_mask_any(&b->home) && !iswf_mask_any(&b->aside) && !iswf_mask_any(&b->far);
}

/* Where the block belongs, as its masks are. */
static void sort(uint32_t block)
{
	struct iswf_block *b = &A->blocks[block];
	enum iswf_queue_name name = ISWF_Q_NONE;

	if (iswf_mask_any(&b->aside))
		name = ISWF_Q_ASIDE;
	else if (iswf_mask_any(&b->home) && !b->fixed)
		name = ISWF_Q_HOME;
	else if (b->placed && is_empty(b))
		name = ISWF_Q_DROP;
	if (name == b->queue)
		return;
	if (name == ISWF_Q_NONE)
		queue_remove(block);
	else
		queue_add(name, block);
	if (name == ISWF_Q_DROP)
		pthread_cond_signal(&A->work);
}

/* Drops the lock for the wake-up. */
static void release(uint32_t block)
{
	struct iswf_block *b = &A->blocks[block];
	bool wanted = b->wanted;

	sort(block);
	b->wanted = false;
	b->claimed = false;
	pthread_cond_broadcast(&A->released);
	pthread_mutex_unlock(&A->lock);
	if (wanted)
		A->ops->wake(iswf_at(block), ISWF_BLOCK_BYTES);
	pthread_mutex_lock(&A->lock);
}

static void held_more(int64_t pages)
{
	A->held_pages += pages;
	if (pages < 0)
		pthread_cond_broadcast(&A->room);
	if (A->held_pages > A->budget_pages)
		pthread_cond_signal(&A->work);
}

void iswf_need(int64_t pages)
{
	uint64_t begin = 0, now;

	while (A->held_pages + pages > A->budget_pages && !A->resting) {
		struct timespec until;

		now = iswf_now_ns();
		if (begin == 0) {
			begin = now;
			count(&A->count.room_waits, 1);
		}
		if (now - begin >= ROOM_NS_MAX || now < A->full_until_ns)
			break;
		pthread_cond_signal(&A->work);
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_nsec += 5000000;
		if (until.tv_nsec >= 1000000000) {
			until.tv_nsec -= 1000000000;
			until.tv_sec++;
		}
		pthread_cond_timedwait(&A->room, &A->lock, &until);
	}
	if (begin != 0)
		count(&A->count.room_wait_ns, iswf_now_ns() - begin);
}

/* ------------------------------------------------- slots of shadow and cradle; lock held */

/* The slot's first byte; of the one behind the last it is the end. */
static char *shadow_slot(uint32_t slot)
{
	return A->shadow + (uint64_t)slot * ISWF_BLOCK_BYTES;
}

static char *shadow_of(const struct iswf_block *b)
{
	return shadow_slot(b->slot - 1);
}

static void shadow_take(struct iswf_block *b)
{
	b->slot = A->shadow_free[--A->shadow_free_count] + 1;
}

static bool is_shadow(const char *at)
{
	return at >= A->shadow && at < shadow_slot(ISWF_SHADOW_SLOTS);
}

static void shadow_give(struct iswf_block *b)
{
	A->shadow_free[A->shadow_free_count++] = b->slot - 1;
	b->slot = 0;
}

/* --------------------------------------------------- claimed, without the lock */

/* Moves every run of `pages`; returns those that were moved. */
static struct iswf_mask move_runs(char *to, char *from, const struct iswf_mask *pages)
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
static void copy_aside(uint32_t block, char *to, const struct iswf_mask *pages)
{
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run) {
		size_t at = (size_t)first * ISWF_PAGE_BYTES;

		(void)A->ops->copy(to + at, shadow_of(&A->blocks[block]) + at,
				   (size_t)run * ISWF_PAGE_BYTES);
	}
}

/* What lies aside goes back. A page that cannot be moved (never seen) is copied. */
static void put_back(uint32_t block, const struct iswf_mask *aside)
{
	struct iswf_mask moved = move_runs(iswf_at(block), shadow_of(&A->blocks[block]), aside);
	struct iswf_mask rest = iswf_mask_without(aside, &moved);

	copy_aside(block, iswf_at(block), &rest);
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
			count(&A->count.pages_lost, 1);
		}
	}
}

/* Brings the far pages of `wanted` to the block whose first page is at `to`. */
static void fetch(uint32_t block, char *to, const struct iswf_mask *wanted)
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
	count(&A->count.fetches, 1);
	count(&A->count.pages_in, iswf_mask_count(wanted));
	count(&A->count.fetch_wait_ns, iswf_now_ns() - begin);
}

/* The same for all of a block that is nowhere else, as one page. False: by pages, then. */
static bool fetch_whole(uint32_t block, const struct iswf_mask *far, char *cradle)
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
	count(&A->count.fetches, 1);
	count(&A->count.pages_in, iswf_mask_count(far));
	count(&A->count.fetch_wait_ns, iswf_now_ns() - begin);
	return code == 0 || moved != 0;
}

/* ------------------------------------------------------------------- faults */

/*
 * How much of the block is fetched for a fault at `page`: a window that grows while faults follow
 * each other, and all once that is the cheaper way.
 */
static void choose_window(struct iswf_block *b, uint32_t block, uint32_t page, uint32_t *end_out)
{
	const struct iswf_block *before = block > 0 ? b - 1 : NULL;
	uint32_t window = 1;

	if (b->window != 0 && page == b->window_end)
		window = b->window * WINDOW_GROWTH;
	else if (page == 0 && before != NULL && before->window_end == ISWF_BLOCK_PAGES)
		window = before->window * WINDOW_GROWTH;
	if (window > ISWF_BLOCK_PAGES - page)
		window = ISWF_BLOCK_PAGES - page;
	/* Near the end of the block it is not worth another fault. */
	if (window >= ISWF_BLOCK_PAGES / 4)
		window = ISWF_BLOCK_PAGES - page;
	b->window = (uint16_t)window;
	b->window_end = (uint16_t)(page + window);
	*end_out = page + window;
}

static void whole_window(struct iswf_block *b)
{
	b->window = ISWF_BLOCK_PAGES;
	b->window_end = ISWF_BLOCK_PAGES;
}

/* Lock held, claimed. */
static void fault_far(struct iswf_block *b, uint32_t block, uint32_t page)
{
	uint32_t far_pages = iswf_mask_count(&b->far), end;
	bool alone =
		!iswf_mask_any(&b->home) && !iswf_mask_any(&b->aside) && !iswf_mask_any(&b->hole);
	struct iswf_mask wanted;
	char *cradle = NULL;

	choose_window(b, block, page, &end);
	if (++b->small_fetches > SMALL_FETCHES_MAX || b->window >= ISWF_BLOCK_PAGES / 4) {
		whole_window(b);
		page = 0;
		end = ISWF_BLOCK_PAGES;
	}
	if (end - page == ISWF_BLOCK_PAGES && alone && far_pages >= WHOLE_PAGES_MIN &&
	    A->cradle_free_count > 0) {
		iswf_need(ISWF_BLOCK_PAGES);
		if (A->cradle_free_count > 0)
			cradle = A->cradle + (uint64_t)A->cradle_free[--A->cradle_free_count] *
						     ISWF_BLOCK_BYTES;
	}
	if (cradle != NULL) {
		bool done;

		wanted = b->far;
		pthread_mutex_unlock(&A->lock);
		done = fetch_whole(block, &wanted, cradle);
		pthread_mutex_lock(&A->lock);
		A->cradle_free[A->cradle_free_count++] =
			(uint32_t)((cradle - A->cradle) / ISWF_BLOCK_BYTES);
		if (done) {
			b->home = iswf_mask_range(0, ISWF_BLOCK_PAGES);
			b->far = iswf_mask_range(0, 0);
			held_more(ISWF_BLOCK_PAGES);
			return;
		}
	}
	wanted = iswf_mask_range(page, end);
	wanted = iswf_mask_and(&wanted, &b->far);
	iswf_need(iswf_mask_count(&wanted));
	pthread_mutex_unlock(&A->lock);
	fetch(block, iswf_at(block), &wanted);
	pthread_mutex_lock(&A->lock);
	iswf_mask_add(&b->home, &wanted);
	iswf_mask_take(&b->far, &wanted);
	held_more(iswf_mask_count(&wanted));
	count(&A->count.small_fetches, 1);
}

/* Zeros that belong to the program, not the kernel's page of zeros: it is about to write there. */
static void fill(char *at, uint32_t pages)
{
	static const char zeros[FILL_PAGES * ISWF_PAGE_BYTES];

	while (pages > 0) {
		uint32_t now = pages < FILL_PAGES ? pages : FILL_PAGES;

		(void)A->ops->copy(at, zeros, (size_t)now * ISWF_PAGE_BYTES);
		at += (size_t)now * ISWF_PAGE_BYTES;
		pages -= now;
	}
}

/* Lock held, claimed: a page that nothing has. */
static void fault_empty(struct iswf_block *b, uint32_t block, uint32_t page)
{
	struct iswf_mask all, empty, there = b->home, wanted;
	uint32_t run, end;
	char *cradle = NULL;
	size_t moved;

	iswf_mask_add(&there, &b->aside);
	iswf_mask_add(&there, &b->far);
	iswf_mask_add(&there, &b->hole);
	all = iswf_mask_range(0, ISWF_BLOCK_PAGES);
	empty = iswf_mask_without(&all, &there);
	choose_window(b, block, page, &end);
	if (page == 0 && iswf_mask_count(&empty) == ISWF_BLOCK_PAGES &&
	    iswf_mask_count(&b->live) == ISWF_BLOCK_PAGES && b->window > 1 &&
	    A->cradle_free_count > 0) {
		iswf_need(ISWF_BLOCK_PAGES);
		if (A->cradle_free_count > 0)
			cradle = A->cradle + (uint64_t)A->cradle_free[--A->cradle_free_count] *
						     ISWF_BLOCK_BYTES;
	}
	if (cradle != NULL) {
		int code;

		whole_window(b);
		pthread_mutex_unlock(&A->lock);
		for (size_t at = 0; at < ISWF_BLOCK_BYTES; at += ISWF_PAGE_BYTES)
			((volatile char *)cradle)[at] = 0;
		code = A->ops->move(iswf_at(block), cradle, ISWF_BLOCK_BYTES, &moved);
		if (code != 0)
			A->ops->discard(cradle, ISWF_BLOCK_BYTES, false);
		pthread_mutex_lock(&A->lock);
		A->cradle_free[A->cradle_free_count++] =
			(uint32_t)((cradle - A->cradle) / ISWF_BLOCK_BYTES);
		wanted = iswf_mask_range(0, (uint32_t)(moved / ISWF_PAGE_BYTES));
		iswf_mask_add(&b->home, &wanted);
		held_more(iswf_mask_count(&wanted));
		if (iswf_has(&b->home, page))
			return;
	}
	wanted = iswf_mask_range(page, end);
	wanted = iswf_mask_and(&wanted, &empty);
	iswf_need(iswf_mask_count(&wanted));
	pthread_mutex_unlock(&A->lock);
	for (uint32_t first = page; (run = iswf_mask_run(&wanted, &first)) != 0; first += run)
		fill(iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES, run);
	pthread_mutex_lock(&A->lock);
	iswf_mask_add(&b->home, &wanted);
	held_more(iswf_mask_count(&wanted));
	count(&A->count.pages_filled, iswf_mask_count(&wanted));
}

/* Lock held, claimed. */
static void fault_aside(struct iswf_block *b, uint32_t block)
{
	struct iswf_mask aside = b->aside;

	pthread_mutex_unlock(&A->lock);
	put_back(block, &aside);
	pthread_mutex_lock(&A->lock);
	iswf_mask_add(&b->home, &aside);
	iswf_mask_take(&b->aside, &aside);
	shadow_give(b);
	count(&A->count.pages_back, iswf_mask_count(&aside));
}

/* F4: it is home by our books; the program may have discarded it by a way that we do not see. */
static void fault_home(uint32_t block, uint32_t page)
{
	char *at = iswf_at(block) + (size_t)page * ISWF_PAGE_BYTES;
	int code;

	pthread_mutex_unlock(&A->lock);
	code = A->ops->zero(at, ISWF_PAGE_BYTES);
	if (code != 0)
		A->ops->wake(at, ISWF_PAGE_BYTES);
	pthread_mutex_lock(&A->lock);
}

void iswf_fault(char *at)
{
	struct iswf_block *b;
	uint32_t block, page;

	count(&A->count.faults, 1);
	if (!iswf_is_ours(at)) {
		/* A hole in the shadow: what was there was discarded meanwhile. Or a range that
		 * something else has moved, which is the kernel's by now. */
		if (!is_shadow(at) || A->ops->zero(at, ISWF_PAGE_BYTES) != 0)
			A->ops->wake(at, ISWF_PAGE_BYTES);
		return;
	}
	block = (uint32_t)((at - A->arena) / ISWF_BLOCK_BYTES);
	page = (uint32_t)((at - A->arena) % ISWF_BLOCK_BYTES / ISWF_PAGE_BYTES);
	pthread_mutex_lock(&A->lock);
	b = &A->blocks[block];
	if (b->claimed) {
		b->wanted = true;
		pthread_mutex_unlock(&A->lock);
		return;
	}
	b->claimed = true;
	if (iswf_has(&b->home, page))
		fault_home(block, page);
	else if (iswf_has(&b->aside, page))
		fault_aside(b, block);
	else if (iswf_has(&b->far, page))
		fault_far(b, block, page);
	else
		fault_empty(b, block, page);
	release(block);
	pthread_mutex_unlock(&A->lock);
}

/* ------------------------------------------------------------------- eviction */

/* Lock held: the first block of the queue that nobody has claimed, claimed; ISWF_NONE. */
static uint32_t first_of(enum iswf_queue_name name)
{
	uint32_t block = A->queues[name].count != 0 ? A->queues[name].head : ISWF_NONE;

	while (block != ISWF_NONE && A->blocks[block].claimed)
		block = A->blocks[block].next;
	if (block != ISWF_NONE)
		A->blocks[block].claimed = true;
	return block;
}

/* Lock held, claimed; the pages were moved, or some were. */
static void moved_aside(struct iswf_block *b, uint32_t block, const struct iswf_mask *moved)
{
	b->aside = *moved;
	iswf_mask_take(&b->home, moved);
	b->refusals = 0;
	b->window = b->window_end = 0;
	b->small_fetches = 0;
	queue_add(ISWF_Q_ASIDE, block);
}

static void stays(struct iswf_block *b, uint32_t block)
{
	count(&A->count.refused_moves, 1);
	queue_add(ISWF_Q_HOME, block); /* at its end */
	if (++b->refusals < REFUSALS_MAX)
		return;
	b->fixed = true;
	count(&A->count.handed_back[ISWF_WHY_PINNED], iswf_mask_count(&b->home));
}

bool iswf_evict(void)
{
	struct iswf_mask home, moved;
	struct iswf_block *b;
	uint32_t block = ISWF_NONE;

	pthread_mutex_lock(&A->lock);
	if (!A->resting && A->shadow_free_count > 0 && iswf_now_ns() >= A->full_until_ns)
		block = first_of(ISWF_Q_HOME);
	if (block == ISWF_NONE) {
		pthread_mutex_unlock(&A->lock);
		return false;
	}
	b = &A->blocks[block];
	shadow_take(b);
	home = b->home;
	pthread_mutex_unlock(&A->lock);

	moved = move_runs(shadow_of(b), iswf_at(block), &home);
	if (memcmp(&moved, &home, sizeof(home)) != 0 && iswf_mask_any(&moved))
		put_back(block, &moved); /* some are pinned: a block leaves whole */

	pthread_mutex_lock(&A->lock);
	if (memcmp(&moved, &home, sizeof(home)) == 0) {
		moved_aside(b, block, &moved);
	} else {
		shadow_give(b);
		stays(b, block);
	}
	release(block);
	pthread_mutex_unlock(&A->lock);
	return true;
}

/* Sends the live pages; returns those that the device has now. *code_out: why not all. */
static struct iswf_mask send_runs(uint32_t block, const struct iswf_mask *pages, int *code_out)
{
	struct iswf_mask sent = {{0}};
	uint32_t run;

	*code_out = 0;
	for (uint32_t first = 0; (run = iswf_mask_run(pages, &first)) != 0; first += run) {
		struct iswf_mask part = iswf_mask_range(first, first + run);

		*code_out = A->ops->ask(
			ISWF_WRITE, block, first, run,
			shadow_of(&A->blocks[block]) + (size_t)first * ISWF_PAGE_BYTES, NULL, NULL);
		if (*code_out != 0)
			break;
		iswf_mask_add(&sent, &part);
	}
	return sent;
}

/* Lock held, claimed: what is aside was sent, was not live, or comes home again. */
static void sent_aside(struct iswf_block *b, const struct iswf_mask *sent,
		       const struct iswf_mask *home)
{
	int64_t gone = (int64_t)iswf_mask_count(&b->aside) - iswf_mask_count(home);

	b->aside = iswf_mask_range(0, 0);
	iswf_mask_add(&b->home, home);
	iswf_mask_add(&b->far, sent);
	b->placed |= iswf_mask_any(sent);
	shadow_give(b);
	held_more(-gone);
	count(&A->count.pages_out, iswf_mask_count(sent));
	count(&A->count.blocks_out, 1);
}

bool iswf_send(void)
{
	struct iswf_mask live, sent, rest;
	struct iswf_block *b;
	uint32_t block;
	int code;

	pthread_mutex_lock(&A->lock);
	block = A->resting ? ISWF_NONE : first_of(ISWF_Q_ASIDE);
	if (block == ISWF_NONE) {
		pthread_mutex_unlock(&A->lock);
		return false;
	}
	b = &A->blocks[block];
	live = iswf_mask_and(&b->aside, &b->live);
	pthread_mutex_unlock(&A->lock);

	sent = send_runs(block, &live, &code);
	rest = iswf_mask_without(&live, &sent);
	if (iswf_mask_any(&rest))
		put_back(block, &rest);
	A->ops->discard(shadow_of(b), ISWF_BLOCK_BYTES, true); /* F12 */

	pthread_mutex_lock(&A->lock);
	if (code != 0) {
		count(&A->count.no_room, 1);
		A->full_until_ns = iswf_now_ns() + FULL_NS;
	}
	sent_aside(b, &sent, &rest);
	release(block);
	pthread_mutex_unlock(&A->lock);
	return true;
}

bool iswf_drop(void)
{
	uint32_t block;
	int code;

	pthread_mutex_lock(&A->lock);
	block = first_of(ISWF_Q_DROP);
	pthread_mutex_unlock(&A->lock);
	if (block == ISWF_NONE)
		return false;
	code = A->ops->ask(ISWF_DISCARD, block, 0, ISWF_BLOCK_PAGES, NULL, NULL, NULL);
	pthread_mutex_lock(&A->lock);
	if (code == 0 || code == -ENOENT)
		A->blocks[block].placed = false;
	release(block);
	pthread_mutex_unlock(&A->lock);
	return code == 0;
}

/* ------------------------------------------------------- discards and hand-back */

/* Claimed, without the lock: what of these pages is mapped there still. */
static void discard_mapped(uint32_t block, const struct iswf_mask *pages, bool is_watched)
{
	struct iswf_mask mapped = iswf_mask_without(pages, &A->blocks[block].hole);
	uint32_t run;

	for (uint32_t first = 0; (run = iswf_mask_run(&mapped, &first)) != 0; first += run)
		A->ops->discard(iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES,
				(size_t)run * ISWF_PAGE_BYTES, is_watched);
}

static void leave_mapped(uint32_t block, bool children)
{
	struct iswf_mask all = iswf_mask_range(0, ISWF_BLOCK_PAGES), mapped;
	uint32_t run;

	if (A->blocks[block].left)
		return;
	mapped = iswf_mask_without(&all, &A->blocks[block].hole);
	for (uint32_t first = 0; (run = iswf_mask_run(&mapped, &first)) != 0; first += run)
		(void)A->ops->leave(iswf_at(block) + (size_t)first * ISWF_PAGE_BYTES,
				    (size_t)run * ISWF_PAGE_BYTES, children);
}

void iswf_discard(uint32_t block, uint32_t first, uint32_t end, bool dead)
{
	struct iswf_mask pages = iswf_mask_range(first, end), home, aside;
	size_t at = (size_t)first * ISWF_PAGE_BYTES,
	       bytes = (size_t)(end - first) * ISWF_PAGE_BYTES;
	struct iswf_block *b = claim(block);

	home = iswf_mask_and(&b->home, &pages);
	aside = iswf_mask_and(&b->aside, &pages);
	pthread_mutex_unlock(&A->lock);
	if (iswf_mask_any(&home) || b->fixed)
		discard_mapped(block, &pages, !b->left);
	if (iswf_mask_any(&aside))
		A->ops->discard(shadow_of(b) + at, bytes, true);
	pthread_mutex_lock(&A->lock);
	iswf_mask_take(&b->home, &pages);
	iswf_mask_take(&b->far, &pages);
	iswf_mask_take(&b->aside, &pages);
	if (dead)
		iswf_mask_take(&b->live, &pages);
	if (b->slot != 0 && !iswf_mask_any(&b->aside))
		shadow_give(b);
	held_more(-(int64_t)iswf_mask_count(&home) - iswf_mask_count(&aside));
	release(block);
}

/* Lock held, claimed: all that is not home comes home. */
static void come_home(struct iswf_block *b, uint32_t block)
{
	struct iswf_mask far;

	if (iswf_mask_any(&b->aside))
		fault_aside(b, block);
	far = b->far;
	if (!iswf_mask_any(&far))
		return;
	iswf_need(iswf_mask_count(&far));
	pthread_mutex_unlock(&A->lock);
	fetch(block, iswf_at(block), &far);
	pthread_mutex_lock(&A->lock);
	iswf_mask_add(&b->home, &far);
	b->far = iswf_mask_range(0, 0);
	held_more(iswf_mask_count(&far));
}

void iswf_hand_back(uint32_t first, uint32_t end, bool children, enum iswf_why why)
{
	for (uint32_t block = first; block < end; block++) {
		struct iswf_block *b = claim(block);

		if (!iswf_mask_any(&b->live) && is_empty(b)) { /* nobody's: it stays ours */
			release(block);
			continue;
		}
		come_home(b, block);
		count(&A->count.handed_back[why], iswf_mask_count(&b->home));
		pthread_mutex_unlock(&A->lock);
		/* F2: nothing of it is aside or far. From here on the kernel fills what is empty.
		 */
		leave_mapped(block, children);
		pthread_mutex_lock(&A->lock);
		b->fixed = b->left = true;
		held_more(-(int64_t)iswf_mask_count(&b->home));
		b->home = iswf_mask_range(0, 0);
		b->wanted = true; /* who waits for a page of it asks the kernel now */
		release(block);
	}
}

/* Lock held. Its addresses are no longer ours: something else may be mapped there by now. */
static void unmapped(uint32_t block, uint32_t first, uint32_t end)
{
	struct iswf_mask pages = iswf_mask_range(first, end), home;
	struct iswf_block *b = claim(block);

	home = iswf_mask_and(&b->home, &pages);
	iswf_mask_take(&b->home, &pages);
	held_more(-(int64_t)iswf_mask_count(&home));
	b->fixed = true;
	iswf_mask_add(&b->hole, &pages);
	release(block);
}

/* Lock held. What is aside or far of pages that were moved elsewhere, with the first at `to`. */
static void follow(uint32_t block, uint32_t first, uint32_t end, char *to)
{
	struct iswf_mask pages = iswf_mask_range(first, end), aside, far;
	struct iswf_block *b = claim(block);
	char *base = to - (size_t)first * ISWF_PAGE_BYTES;

	aside = iswf_mask_and(&b->aside, &pages);
	far = iswf_mask_and(&b->far, &pages);
	pthread_mutex_unlock(&A->lock);
	copy_aside(block, base, &aside);
	if (iswf_mask_any(&far))
		fetch(block, base, &far);
	pthread_mutex_lock(&A->lock);
	count(&A->count.handed_back[ISWF_WHY_MOVED], end - first);
	release(block);
}

void iswf_removed(char *from, char *end, bool is_unmapped, char *to)
{
	pthread_mutex_lock(&A->lock);
	for (char *at = from; at < end;) {
		uint32_t block = (uint32_t)((at - A->arena) / ISWF_BLOCK_BYTES);
		uint32_t first = (uint32_t)((at - iswf_at(block)) / ISWF_PAGE_BYTES);
		char *stop = iswf_at(block + 1) < end ? iswf_at(block + 1) : end;
		uint32_t last = (uint32_t)((stop - iswf_at(block)) / ISWF_PAGE_BYTES);

		if (to != NULL)
			follow(block, first, last, to + (at - from));
		if (is_unmapped)
			unmapped(block, first, last);
		iswf_discard(block, first, last, false);
		at = stop;
	}
	pthread_mutex_unlock(&A->lock);
	if (to != NULL)
		(void)A->ops->leave(to, (size_t)(end - from), true);
}
