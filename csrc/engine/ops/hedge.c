/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hedged reads: a donor that hangs must not hold a fault for the whole of its deadline. A read that
 * takes much longer than those that this donor answered of late gets a second leg, from the backup,
 * and the first of the two that ends well answers it (R7).
 *
 * The connection's receiver thread notices (xfer.slow), and it alone writes into a read's buffer,
 * so it can turn the donor's leg from the request's memory to a staging buffer there and then.
 * After that nobody has to be stopped: a reply that comes late, or never, or half, meets a buffer
 * that is held until the donor's leg has ended, and the request is long gone.
 *
 * A read that the backup gets because it is thought the quicker source has both legs from the
 * start, in a pair of buffers of their own, as a thread that is stuck in a read cannot be turned to
 * another buffer, and staging may be full of pages that wait for this very disk. The donor's leg is
 * sent when the backup's is slow; so a disk that hangs holds up nothing that a donor has.
 */
#include <errno.h>
#include <string.h>

#include "engine/ops/ops.h"
#include "engine/state/seal.h"

/* Buffers of copies and hedges together: 16 pages in each of 32 reads, both legs. */
#define HEDGE_PAGES_MAX 1024u

#define BOTH_ENDED (ISWI_HEDGE_REMOTE_END | ISWI_HEDGE_BACKUP_END)

/* --------------------------------------------------------------- the second leg */

/* Slots from staging_pages on are those of the pairs. */
static bool in_pair(const struct isw_engine *e, uint32_t slot)
{
	return slot >= e->config.staging_pages;
}

static unsigned char *leg_data(const struct isw_engine *e, const struct iswi_op *leg)
{
	if (in_pair(e, leg->slot))
		return e->pairs_data +
		       (uint64_t)(leg->slot - e->config.staging_pages) * ISW_PAGE_BYTES;
	return e->staging + (uint64_t)leg->slot * ISW_PAGE_BYTES;
}

/* Every page is on the backup and none is staged. */
static bool on_backup(struct isw_engine *e, uint64_t page, uint64_t end)
{
	bool all = true;

	while (page < end && all) {
		uint64_t stop = iswi_group_end(page, end);
		struct iswi_shard *shard = iswi_shard_of(e, page);

		pthread_mutex_lock(&shard->lock);
		for (; page < stop && all; page++) {
			const struct iswi_entry *entry = iswi_entry_find(e, page);

			all = iswi_bit(e->backup_current, page) &&
			      (!entry || iswi_entry_newest(e, entry) == ISWI_NONE);
		}
		pthread_mutex_unlock(&shard->lock);
	}
	return all;
}

static void give_buffers(struct isw_engine *e, uint32_t slot, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		iswi_staging_give(e, slot + i);
}

/* Slot of the first leg, or ISWI_NONE. The second one's is PAIR_PAGES after it. */
static uint32_t take_pair(struct isw_engine *e)
{
	uint32_t free = atomic_load(&e->pairs_free);

	while (free)
		if (atomic_compare_exchange_weak(&e->pairs_free, &free, free & (free - 1)))
			return e->config.staging_pages +
			       (uint32_t)__builtin_ctz(free) * 2 * ISWI_PAIR_PAGES;
	return ISWI_NONE;
}

static void give_pair(struct isw_engine *e, uint32_t slot)
{
	uint32_t pair = (slot - e->config.staging_pages) / (2 * ISWI_PAIR_PAGES);

	atomic_fetch_or(&e->pairs_free, 1u << pair);
}

/*
 * A buffer for each leg, or none at all. A pair where one will do: staging may be full of pages
 * that wait for this very donor.
 */
static bool take_buffers(struct isw_engine *e, uint32_t pages, uint32_t *slot, uint32_t *twin_slot)
{
	uint32_t n, m;

	*slot = pages <= ISWI_PAIR_PAGES ? take_pair(e) : ISWI_NONE;
	*twin_slot = *slot + ISWI_PAIR_PAGES;
	if (*slot != ISWI_NONE)
		return true;
	n = iswi_staging_take_spare(e, pages, HEDGE_PAGES_MAX, slot);
	m = n < pages ? 0 : iswi_staging_take_spare(e, pages, HEDGE_PAGES_MAX, twin_slot);
	if (n == pages && m == pages)
		return true;
	give_buffers(e, *slot, n);
	give_buffers(e, *twin_slot, m);
	if (n)
		iswi_write_kick(e);
	return false;
}

static void backup_leg_done(struct iswi_op *op, int error)
{
	iswi_hedge_ended(op, false, error);
}

void iswi_hedge_begin(struct iswi_op *op, uint32_t received)
{
	struct isw_engine *e = op->engine;
	struct iswi_op *leg;
	uint32_t slot = 0, twin_slot = 0;

	if (!on_backup(e, op->page, op->page + op->pages) ||
	    !take_buffers(e, op->pages, &slot, &twin_slot))
		return;
	leg = iswi_op_take(e);
	leg->req = op->req;
	leg->page = op->page;
	leg->pages = op->pages;
	leg->slab = op->slab;
	leg->slot = twin_slot;
	leg->xfer.buf = leg_data(e, leg);
	leg->twin = op;
	leg->done = backup_leg_done;
	op->slot = slot;
	op->twin = leg;
	atomic_init(&op->hedge, 0);
	memcpy(leg_data(e, op), op->xfer.buf, received);
	op->xfer.buf = leg_data(e, op);
	atomic_fetch_add_explicit(&iswi_remote_of(e, op->slab, op->place)->hedges, 1,
				  memory_order_relaxed);
	iswi_count(&e->count.hedged_reads, 1);
	/* From here on the request may end at any time. */
	iswi_backup_read(e, leg);
}

/* ------------------------------------------------------------- the backup's leg first */

/* The backup's leg may have ended by now, but nobody gives it back before the donor's has. */
static void backup_leg_slow(struct iswi_xfer *xfer, uint32_t received)
{
	struct iswi_op *op = ISWI_CONTAINER(xfer, struct iswi_op, xfer)->twin;

	(void)received;
	iswi_count(&op->engine->count.hedged_reads, 1);
	iswi_remote_submit(op->engine, op);
}

bool iswi_hedge_backup_first(struct iswi_op *op, uint64_t measured_ns)
{
	struct isw_engine *e = op->engine;
	uint32_t slot = take_pair(e);
	struct iswi_op *leg;

	if (slot == ISWI_NONE)
		return false;
	leg = iswi_op_take(e);
	leg->req = op->req;
	leg->page = op->page;
	leg->pages = op->pages;
	leg->slab = op->slab;
	leg->slot = slot + ISWI_PAIR_PAGES;
	leg->measured_ns = measured_ns;
	leg->xfer.buf = leg_data(e, leg);
	leg->xfer.slow = backup_leg_slow;
	/* Of a measurement the donor's answer is expected sooner. */
	leg->xfer.slow_us = iswi_backup_slow_after_us(e, op->pages);
	if (measured_ns)
		leg->xfer.slow_us = ISWI_MIN(leg->xfer.slow_us, e->config.hedge_us_min);
	leg->twin = op;
	leg->done = backup_leg_done;
	op->slot = slot;
	op->twin = leg;
	op->last = true;
	op->xfer.buf = leg_data(e, op);
	atomic_init(&op->hedge, 0);
	iswi_backup_read(e, leg);
	return true;
}

/* ------------------------------------------------------------------ the legs' ends */

/* The leg's bytes are right; seals_out: with what they were compared, page by page. */
static bool verified(struct isw_engine *e, const struct iswi_op *leg, struct iswi_seal *seals_out)
{
	uint64_t page = leg->page, end = leg->page + leg->pages;
	const unsigned char *data = leg_data(e, leg);
	bool good = true;

	while (page < end && good) {
		uint64_t stop = iswi_group_end(page, end), at = page - leg->page;

		good = !iswi_pages_check(e, data + at * ISW_PAGE_BYTES, page,
					 (uint32_t)(stop - page), seals_out + at);
		page = stop;
	}
	return good;
}

static void count_answer(struct isw_engine *e, const struct iswi_op *leg, bool remote)
{
	uint32_t pages = leg->pages;

	iswi_count(remote ? &e->count.pages_in_remote : &e->count.pages_in_backup, pages);
	if (!remote && (!leg->twin->last || leg->twin->tried & ISWI_PAST_SLOW))
		iswi_count(&e->count.fallback_slow, pages);
	else if (!remote)
		iswi_count(leg->measured_ns ? &e->count.fallback_measured
					    : &e->count.fallback_quicker,
			   pages);
	if (remote ? leg->last : !leg->twin->last) /* the second leg */
		iswi_count(&e->count.hedged_wins, 1);
}

/* The request gets this leg's pages, which have been verified with these seals. */
static void answer(struct isw_engine *e, const struct iswi_op *leg, const struct iswi_seal *seals,
		   bool remote)
{
	unsigned char *to = (unsigned char *)leg->req->data;
	const unsigned char *from = leg_data(e, leg);

	to += leg->page * ISW_PAGE_BYTES - leg->req->offset;
	if (!iswi_sealed(e))
		memcpy(to, from, (size_t)leg->pages * ISW_PAGE_BYTES);
	for (uint32_t i = 0; iswi_sealed(e) && i < leg->pages; i++)
		iswi_seal_open(e, leg->page + i, &seals[i], from + (size_t)i * ISW_PAGE_BYTES,
			       to + (size_t)i * ISW_PAGE_BYTES);
	count_answer(e, leg, remote);
}

/* Both legs have ended: nobody else looks at them. */
static void release(struct isw_engine *e, struct iswi_op *a, struct iswi_op *b)
{
	uint32_t a_slot = a->slot, b_slot = b->slot, pages = a->pages;

	/* Before their buffers are: there is one for each buffer, no more. */
	iswi_op_give(e, a);
	iswi_op_give(e, b);
	if (in_pair(e, a_slot)) {
		give_pair(e, a_slot); /* the other one's is of the same pair */
		return;
	}
	give_buffers(e, a_slot, pages);
	give_buffers(e, b_slot, pages);
}

/* Neither leg's bytes answer the request: its pages are read again. */
static void read_again(struct iswi_op *lost, uint32_t state)
{
	lost->tried = ISWI_HEDGED;
	if (state & ISWI_HEDGE_REMOTE_FAIL)
		lost->tried |= iswi_tried_place(lost->place);
	if (state & ISWI_HEDGE_BACKUP_FAIL)
		lost->tried |= ISWI_TRIED_BACKUP;
	lost->done(lost, -EIO);
}

void iswi_hedge_ended(struct iswi_op *op, bool remote, int error)
{
	struct isw_engine *e = op->engine;
	struct iswi_op *twin = op->twin, lost = iswi_op_rest(remote ? op : twin);
	struct iswi_req *req = op->req;
	struct iswi_seal seals[ISWI_STRIPE_PAGES]; /* no transfer is longer */
	atomic_uint *hedge = remote ? &op->hedge : &twin->hedge;
	uint32_t bits = remote ? ISWI_HEDGE_REMOTE_END : ISWI_HEDGE_BACKUP_END, state;
	bool won, again = false;

	if (error)
		bits |= remote ? ISWI_HEDGE_REMOTE_FAIL : ISWI_HEDGE_BACKUP_FAIL;
	if (error && !remote)
		iswi_count(&e->count.backup_errors, 1);
	if (!remote && twin->last && !op->slow) { /* the donor was not asked */
		iswi_place_put(e, twin->slab, twin->place);
		bits |= ISWI_HEDGE_REMOTE_END;
	}
	won = !error && !(atomic_load(hedge) & ISWI_HEDGE_WON) && verified(e, op, seals) &&
	      !(atomic_fetch_or(hedge, ISWI_HEDGE_WON) & ISWI_HEDGE_WON);
	if (won)
		answer(e, op, seals, remote);  /* before the twin may give our buffer back */
	else if (remote && op->last && !error) /* outdated: no reason to wait for a slow disk */
		again = !(atomic_fetch_or(hedge, ISWI_HEDGE_WON) & ISWI_HEDGE_WON);
	state = atomic_fetch_or(hedge, bits) | bits;
	if ((state & BOTH_ENDED) == BOTH_ENDED) {
		again |= !(state & ISWI_HEDGE_WON);
		release(e, op, twin);
	}
	if (again)
		read_again(&lost, state);
	if ((state & BOTH_ENDED) == BOTH_ENDED)
		iswi_write_kick(e);
	if (won || again)
		iswi_req_put(e, req);
}
