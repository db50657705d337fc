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
 */
#include <errno.h>
#include <string.h>

#include "engine/ops/ops.h"

/* Buffers of copies and hedges together: 16 pages in each of 32 reads, both legs. */
#define HEDGE_PAGES_MAX 1024u

#define BOTH_ENDED (ISWI_HEDGE_REMOTE_END | ISWI_HEDGE_BACKUP_END)

/* --------------------------------------------------------------- the second leg */

static unsigned char *leg_data(const struct isw_engine *e, const struct iswi_op *leg)
{
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

/* A buffer for each leg, or none at all. */
static bool take_buffers(struct isw_engine *e, uint32_t pages, uint32_t *slot, uint32_t *twin_slot)
{
	uint32_t n = iswi_staging_take_spare(e, pages, HEDGE_PAGES_MAX, slot);
	uint32_t m = n < pages ? 0 : iswi_staging_take_spare(e, pages, HEDGE_PAGES_MAX, twin_slot);

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

/* ------------------------------------------------------------------ the legs' ends */

static bool verified(struct isw_engine *e, const struct iswi_op *leg)
{
	uint64_t page = leg->page, end = leg->page + leg->pages;
	const unsigned char *data = leg_data(e, leg);
	bool good = true;

	while (page < end && good) {
		uint64_t stop = iswi_group_end(page, end);

		good = !iswi_pages_wrong(e, data + (page - leg->page) * ISW_PAGE_BYTES, page,
					 (uint32_t)(stop - page));
		page = stop;
	}
	return good;
}

/* The request gets this leg's bytes. */
static void answer(struct isw_engine *e, const struct iswi_op *leg, bool remote)
{
	struct iswi_req *req = leg->req;

	memcpy((unsigned char *)req->data + (leg->page * ISW_PAGE_BYTES - req->offset),
	       leg_data(e, leg), (size_t)leg->pages * ISW_PAGE_BYTES);
	if (remote) {
		iswi_count(&e->count.pages_in_remote, leg->pages);
	} else {
		iswi_count(&e->count.pages_in_backup, leg->pages);
		iswi_count(&e->count.fallback_slow, leg->pages);
		iswi_count(&e->count.hedged_wins, 1);
	}
}

/* Both legs have ended: nobody else looks at them. */
static void release(struct isw_engine *e, struct iswi_op *a, struct iswi_op *b)
{
	uint32_t a_slot = a->slot, b_slot = b->slot, pages = a->pages;

	/* Before their buffers are: there is one for each buffer, no more. */
	iswi_op_give(e, a);
	iswi_op_give(e, b);
	give_buffers(e, a_slot, pages);
	give_buffers(e, b_slot, pages);
}

void iswi_hedge_ended(struct iswi_op *op, bool remote, int error)
{
	struct isw_engine *e = op->engine;
	struct iswi_op *twin = op->twin;
	struct iswi_req *req = op->req;
	atomic_uint *hedge = remote ? &op->hedge : &twin->hedge;
	uint32_t bits = remote ? ISWI_HEDGE_REMOTE_END : ISWI_HEDGE_BACKUP_END, state;
	bool won;

	if (error)
		bits |= remote ? ISWI_HEDGE_REMOTE_FAIL : ISWI_HEDGE_BACKUP_FAIL;
	if (error && !remote)
		iswi_count(&e->count.backup_errors, 1);
	won = !error && !(atomic_load(hedge) & ISWI_HEDGE_WON) && verified(e, op) &&
	      !(atomic_fetch_or(hedge, ISWI_HEDGE_WON) & ISWI_HEDGE_WON);
	if (won)
		answer(e, op, remote); /* before the twin may give our buffer back */
	state = atomic_fetch_or(hedge, bits) | bits;
	if ((state & BOTH_ENDED) == BOTH_ENDED) {
		struct iswi_op lost = remote ? *op : *twin;

		release(e, op, twin);
		if (!(state & ISWI_HEDGE_WON)) {
			lost.tried = ISWI_HEDGED;
			if (state & ISWI_HEDGE_REMOTE_FAIL)
				lost.tried |= iswi_tried_place(lost.place);
			if (state & ISWI_HEDGE_BACKUP_FAIL)
				lost.tried |= ISWI_TRIED_BACKUP;
			lost.done(&lost, -EIO);
			won = true;
		}
		iswi_write_kick(e);
	}
	if (won)
		iswi_req_put(e, req);
}
