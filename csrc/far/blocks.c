/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What the handlers of blocks share: queues, claims and slots. A handler claims the block it works
 * on, works without the lock, says in the masks what it did, and releases the block. A fault in a
 * claimed block marks it as wanted: its release wakes the thread, which faults again if it has to.
 */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "far/blocks.h"

#define ROOM_NS_MAX  200000000ull /* longest wait for memory: then the kernel swaps */
#define ROOM_STEP_NS 5000000

struct iswf_agent iswf_agent = {
	.lock = PTHREAD_MUTEX_INITIALIZER,
	.released = PTHREAD_COND_INITIALIZER,
	.room = PTHREAD_COND_INITIALIZER,
	.work = PTHREAD_COND_INITIALIZER,
};

/*
 * Where a program reads in turn what does not fit, first in, first out lets each block leave just
 * before it is wanted. So a block that comes back twice in a row after about as many others have
 * left, and more than this share of the blocks in both queues, waits with its like in a queue that
 * leaves first above that share, and the other blocks stay. (2Q, by Johnson and Shasha, VLDB 1994,
 * does that at the first return.) It goes back there if it is wanted while it is aside: that is the
 * same use of it.
 */
#define LOOPED_SHARE 4u
/*
 * The blocks that stay may no longer be used. So each OTHER_TURNS-th victim comes from the other
 * queue, and while HOME has less than this share of the blocks, those that come back join it.
 */
#define OTHER_TURNS 8u
#define HOME_SHARE  2u
/* A program may still be in its first use of this share of the budget's blocks, for this long. */
#define FILLING_SHARE 8
#define FILLED_MS_MAX 1000u
/* Evicted ahead of need: room for this share of the budget is kept, and for so much. */
#define AHEAD_SHARE     8
#define AHEAD_PAGES_MIN (2 * (int64_t)ISWF_BLOCK_PAGES)
#define AHEAD_PAGES_MAX (4 * (int64_t)ISWF_BLOCK_PAGES)
/* What was freed is taken again soon, or not at all: then the host may have it. */
#define FREED_MS_MAX 2000u
/* Blocks of zeros that are made before anybody asks, and the least budget beside which they count
 * for little. */
#define READY_MAX        2u
#define READY_BUDGET_MIN (64 * (int64_t)ISWF_BLOCK_PAGES)

#define A (&iswf_agent)

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

void iswf_queue_add(enum iswf_queue_name name, uint32_t block)
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

/* ------------------------------------------------------------- far; lock held */

void iswf_go_away(struct iswf_block *b, const struct iswf_mask *pages)
{
	struct iswf_mask more = iswf_mask_without(pages, &b->far);

	iswf_count(&A->count.pages_away, iswf_mask_count(&more));
	iswf_mask_add(&b->far, pages);
}

void iswf_come_back(struct iswf_block *b, const struct iswf_mask *pages)
{
	struct iswf_mask fewer = iswf_mask_and(pages, &b->far);

	iswf_count(&A->count.pages_away, -(uint64_t)iswf_mask_count(&fewer));
	iswf_mask_take(&b->far, pages);
}

/* ------------------------------------------------------------ claims; lock held */

struct iswf_block *iswf_claim(uint32_t block)
{
	struct iswf_block *b = &A->blocks[block];

	while (b->claimed)
		pthread_cond_wait(&A->released, &A->lock);
	b->claimed = true;
	return b;
}

/* Lock held: the first block of the queue that nobody has claimed, claimed; ISWF_NONE. */
uint32_t iswf_claim_first(enum iswf_queue_name name)
{
	uint32_t block = A->queues[name].count != 0 ? A->queues[name].head : ISWF_NONE;

	while (block != ISWF_NONE && A->blocks[block].claimed)
		block = A->blocks[block].next;
	if (block != ISWF_NONE)
		A->blocks[block].claimed = true;
	return block;
}

uint32_t iswf_now_ms(void)
{
	return (uint32_t)(iswf_now_ns() / 1000000);
}

/* Whether a block of FREED or FILLED has been there for so long. */
static bool is_old(enum iswf_queue_name name, uint32_t ms)
{
	const struct iswf_queue *queue = &A->queues[name];

	return queue->count != 0 && iswf_now_ms() - A->blocks[queue->head].queued_ms > ms;
}

/* Of HOME: nobody has claimed it, and the kernel has not just refused to move it. */
static bool may_leave(const struct iswf_block *b)
{
	return !b->claimed && (b->refusals == 0 || iswf_now_ms() - b->queued_ms >= ISWF_REFUSED_MS);
}

/* The first block of the queue that may leave, claimed; ISWF_NONE. */
static uint32_t claim_from(enum iswf_queue_name name)
{
	uint32_t block = A->queues[name].count != 0 ? A->queues[name].head : ISWF_NONE;

	while (block != ISWF_NONE && !may_leave(&A->blocks[block]))
		block = A->blocks[block].next;
	if (block != ISWF_NONE)
		A->blocks[block].claimed = true;
	return block;
}

uint32_t iswf_budget_blocks(void)
{
	int64_t blocks = A->budget_pages / ISWF_BLOCK_PAGES;

	return blocks < 0 ? 0 : blocks > ISWF_BLOCKS_MAX ? ISWF_BLOCKS_MAX : (uint32_t)blocks;
}

/* How many blocks are in both queues. */
static uint32_t count_home(void)
{
	return A->queues[ISWF_Q_HOME].count + A->queues[ISWF_Q_LOOPED].count;
}

static uint32_t claim_home(void)
{
	bool many = A->queues[ISWF_Q_LOOPED].count > count_home() / LOOPED_SHARE;
	bool looped = many != (++A->turns_count % OTHER_TURNS == 0);
	uint32_t block = claim_from(looped ? ISWF_Q_LOOPED : ISWF_Q_HOME);

	return block != ISWF_NONE ? block : claim_from(looped ? ISWF_Q_HOME : ISWF_Q_LOOPED);
}

void iswf_begin_stay(struct iswf_block *b)
{
	uint32_t away = A->left_count - b->left_at;

	b->looped = away > count_home() / LOOPED_SHARE && b->away != 0 && away / 2 <= b->away &&
		    b->away / 2 <= away && A->queues[ISWF_Q_HOME].count > count_home() / HOME_SHARE;
	b->away = away;
}

uint32_t iswf_claim_unsent(void)
{
	uint32_t block = iswf_claim_first(ISWF_Q_FREED);

	if (block == ISWF_NONE &&
	    (A->queues[ISWF_Q_FILLED].count > iswf_budget_blocks() / FILLING_SHARE ||
	     is_old(ISWF_Q_FILLED, FILLED_MS_MAX)))
		block = iswf_claim_first(ISWF_Q_FILLED);
	return block;
}

uint32_t iswf_claim_victim(void)
{
	uint32_t block = iswf_claim_unsent();

	if (block != ISWF_NONE)
		return block;
	block = claim_home();
	return block != ISWF_NONE ? block : iswf_claim_first(ISWF_Q_FILLED);
}

bool iswf_is_empty(const struct iswf_block *b)
{
	return !iswf_mask_any(&b->home) && !iswf_mask_any(&b->aside) && !iswf_mask_any(&b->far);
}

bool iswf_takes_huge(struct iswf_block *b, uint32_t block)
{
	if (!b->tabled)
		return true;
	/* The marks of lost pages would go with it, or what somebody else has mapped there. */
	if (iswf_is_unsure(b) || b->mapped)
		return false;
	pthread_mutex_unlock(&A->lock);
	b->tabled = !A->ops->untable(iswf_at(block));
	pthread_mutex_lock(&A->lock);
	return !b->tabled;
}

void iswf_sort(uint32_t block)
{
	struct iswf_block *b = &A->blocks[block];
	enum iswf_queue_name name = ISWF_Q_NONE;

	if (!iswf_mask_any(&b->live))
		b->looked = b->mapped = false;
	if (!iswf_mask_any(&b->live) || iswf_is_empty(b)) {
		b->looped = b->paid = false;
		b->away = b->rent = 0;
	}
	if (iswf_mask_any(&b->aside))
		name = ISWF_Q_ASIDE;
	else if (iswf_mask_any(&b->home) && !b->fixed)
		name = !iswf_mask_any(&b->live) && b->refusals == 0 ? ISWF_Q_FREED
		       : b->filled                                  ? ISWF_Q_FILLED
		       : b->looped                                  ? ISWF_Q_LOOPED
								    : ISWF_Q_HOME;
	else if (b->placed && iswf_is_empty(b))
		name = ISWF_Q_DROP;
	if (name == b->queue)
		return;
	if (name == ISWF_Q_NONE)
		queue_remove(block);
	else
		iswf_queue_add(name, block);
	if (name == ISWF_Q_DROP)
		pthread_cond_signal(&A->work);
	else if (name == ISWF_Q_FREED || name == ISWF_Q_FILLED)
		b->queued_ms = iswf_now_ms();
}

/* F15: the device's bytes of a page that is nowhere are not the page's next bytes. */
static void keep_known(struct iswf_block *b)
{
	struct iswf_mask somewhere = b->home;

	iswf_mask_add(&somewhere, &b->aside);
	iswf_mask_add(&somewhere, &b->far);
	b->known = iswf_mask_and(&b->known, &somewhere);
}

/* Drops the lock for the wake-up. */
void iswf_release(uint32_t block)
{
	struct iswf_block *b = &A->blocks[block];
	bool wanted = b->wanted;

	keep_known(b);
	iswf_sort(block);
	b->wanted = false;
	b->claimed = false;
	pthread_cond_broadcast(&A->released);
	pthread_mutex_unlock(&A->lock);
	if (wanted)
		A->ops->wake(iswf_at(block), ISWF_BLOCK_BYTES);
	pthread_mutex_lock(&A->lock);
}

void iswf_held_more(int64_t pages)
{
	A->held_pages += pages;
	if (pages < 0)
		pthread_cond_broadcast(&A->room);
	if (A->held_pages > A->budget_pages)
		pthread_cond_signal(&A->work);
}

bool iswf_is_tight(void)
{
	/* What was brought ahead evicts nothing, as long as a fault finds room for a block: it has
	 * a part of the room that is kept. */
	int64_t used = A->held_pages - (int64_t)A->ahead_count * ISWF_BLOCK_PAGES;
	int64_t kept = A->budget_pages / AHEAD_SHARE;

	kept = kept < AHEAD_PAGES_MIN   ? AHEAD_PAGES_MIN
	       : kept > AHEAD_PAGES_MAX ? AHEAD_PAGES_MAX
					: kept;
	return used + kept > A->budget_pages || A->held_pages + ISWF_BLOCK_PAGES > A->budget_pages;
}

bool iswf_is_stale(void)
{
	return is_old(ISWF_Q_FREED, FREED_MS_MAX);
}

/* Not by the clock of day: somebody may set it back. */
void iswf_clocks_init(void)
{
	pthread_condattr_t attr;

	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&A->room, &attr);
	pthread_cond_init(&A->work, &attr);
	pthread_condattr_destroy(&attr);
}

void iswf_wait(pthread_cond_t *cond, long ns)
{
	struct timespec until;

	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_nsec += ns;
	if (until.tv_nsec >= 1000000000) {
		until.tv_nsec -= 1000000000;
		until.tv_sec++;
	}
	pthread_cond_timedwait(cond, &A->lock, &until);
}

/* Lock held: false where all that is home is fixed there. */
static bool can_leave(void)
{
	return count_home() + A->queues[ISWF_Q_FREED].count + A->queues[ISWF_Q_FILLED].count +
		       A->queues[ISWF_Q_ASIDE].count !=
	       0;
}

void iswf_need(int64_t pages)
{
	uint64_t begin = 0, now;

	while (A->held_pages + pages > A->budget_pages && !A->overfull && can_leave() &&
	       !iswf_rests()) {
		now = iswf_now_ns();
		if (begin == 0) {
			begin = now;
			iswf_count(&A->count.room_waits, 1);
		}
		if (now - begin >= ROOM_NS_MAX || iswf_keeps_all(now))
			break;
		pthread_cond_signal(&A->work);
		iswf_wait(&A->room, ROOM_STEP_NS);
	}
	if (begin != 0)
		iswf_count(&A->count.room_wait_ns, iswf_now_ns() - begin);
}

/* ------------------------------------------------- slots of shadow and cradle; lock held */

/* The slot's first byte; of the one behind the last it is the end. */
static char *shadow_slot(uint32_t slot)
{
	return A->shadow + (uint64_t)slot * ISWF_BLOCK_BYTES;
}

char *iswf_shadow_of(const struct iswf_block *b)
{
	return shadow_slot(b->slot - 1);
}

void iswf_shadow_take(struct iswf_block *b)
{
	b->slot = A->shadow_free[--A->shadow_free_count] + 1;
}

bool iswf_is_shadow(const char *at)
{
	return at >= A->shadow && at < shadow_slot(ISWF_SHADOW_SLOTS);
}

void iswf_shadow_give(struct iswf_block *b)
{
	if (b->slot == 0 || iswf_mask_any(&b->aside))
		return;
	A->shadow_free[A->shadow_free_count++] = b->slot - 1;
	b->slot = 0;
	A->ahead_count -= b->ahead;
	b->ahead = false;
}

static char *cradle_slot(uint32_t slot)
{
	return A->cradle + (uint64_t)slot * ISWF_BLOCK_BYTES;
}

char *iswf_cradle_take(void)
{
	if (A->ready_count > 0) {
		pthread_cond_signal(&A->work); /* for the next one */
		return cradle_slot(A->ready[--A->ready_count]);
	}
	if (A->cradle_free_count == 0)
		return NULL;
	iswf_need(ISWF_BLOCK_PAGES);
	if (A->cradle_free_count == 0)
		return NULL;
	return cradle_slot(A->cradle_free[--A->cradle_free_count]);
}

/* Lock held. What is ready is not held: it lessens what the budget leaves, as others' memory. */
static bool lacks_ready(void)
{
	return A->watched && !iswf_rests() && A->ready_count < READY_MAX &&
	       A->cradle_free_count > 1 && A->budget_pages >= READY_BUDGET_MIN &&
	       A->held_pages + ISWF_BLOCK_PAGES <= A->budget_pages;
}

bool iswf_make_ready(void)
{
	uint32_t slot = ISWF_NONE;

	pthread_mutex_lock(&A->lock);
	if (lacks_ready())
		slot = A->cradle_free[--A->cradle_free_count];
	pthread_mutex_unlock(&A->lock);
	if (slot == ISWF_NONE)
		return false;
	iswf_cradle_open(cradle_slot(slot));
	pthread_mutex_lock(&A->lock);
	A->ready[A->ready_count++] = slot;
	pthread_mutex_unlock(&A->lock);
	return true;
}

static void touch(char *at, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += ISWF_PAGE_BYTES)
		((volatile char *)at)[i] = 0;
}

/* Where single pages have been, their page table keeps huge ones away. */
void iswf_cradle_open(char *cradle)
{
	touch(cradle, 1);
	if (A->ops->is_huge(cradle))
		return;
	(void)A->ops->renew(cradle);
	touch(cradle, ISWF_BLOCK_BYTES);
}

void iswf_cradle_clear(char *cradle, size_t moved)
{
	if (moved < ISWF_BLOCK_BYTES && A->ops->renew(cradle) != 0)
		memset(cradle + moved, 0, ISWF_BLOCK_BYTES - moved); /* all may be locked */
}

void iswf_cradle_give(char *cradle)
{
	A->cradle_free[A->cradle_free_count++] =
		(uint32_t)((cradle - A->cradle) / ISWF_BLOCK_BYTES);
}
