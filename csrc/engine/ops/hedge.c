/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Hedged reads: a donor that hangs must not hold a fault for the whole of its deadline. A read that
 * takes much longer than those that this donor answered of late gets a second leg, from the backup,
 * and the first of the two that ends well answers it (R7).
 *
 * The connection's receiver thread notices (xfer.slow), and it alone writes into a read's buffer,
 * so it can take the request's memory from the donor's leg there and then. After that nobody has to
 * be stopped: a reply that comes late, or never, or half, meets other memory, or none, and the
 * request is long gone.
 *
 * A short read gets a pair of buffers, one for each leg, which are held until both legs have ended.
 * A donor that is frozen holds its buffers until it thaws, and there is no end of what large reads
 * would need. So a read without a pair is hedged bare: what its donor still sends is dropped, and
 * the backup's thread reads into memory of its own. A donor that answers such a read first is back,
 * and is asked again.
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

#define BOTH_ENDED (ISWI_HEDGE_REMOTE_END | ISWI_HEDGE_BACKUP_END)

/* --------------------------------------------------------------- the second leg */

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

/* The number of a pair, or ISWI_NONE. */
static uint32_t take_pair(struct isw_engine *e)
{
	uint32_t free = atomic_load(&e->pairs_free);

	while (free)
		if (atomic_compare_exchange_weak(&e->pairs_free, &free, free & (free - 1)))
			return (uint32_t)__builtin_ctz(free);
	return ISWI_NONE;
}

/* The ops of a bare hedge, which may outlive its request. */
static bool take_bare(struct isw_engine *e)
{
	uint32_t free = atomic_load(&e->bare_free);

	while (free)
		if (atomic_compare_exchange_weak(&e->bare_free, &free, free - 1))
			return true;
	return false;
}

static bool is_bare(const struct iswi_op *leg)
{
	return leg->slot == ISWI_NONE;
}

static void backup_leg_done(struct iswi_op *op, int error)
{
	iswi_hedge_ended(op, false, error);
}

/* The backup's leg of a donor's, with that pair's buffers, or bare. */
static struct iswi_op *twin_of(struct iswi_op *op, uint32_t pair)
{
	struct isw_engine *e = op->engine;
	struct iswi_op *leg = iswi_op_take(e);
	unsigned char *data = NULL;

	leg->req = op->req;
	leg->page = op->page;
	leg->pages = op->pages;
	leg->slab = op->slab;
	leg->slot = op->slot = pair;
	leg->twin = op;
	leg->done = backup_leg_done;
	if (pair != ISWI_NONE)
		data = e->pairs_data + (uint64_t)pair * ISWI_PAIR_BYTES;
	op->xfer.buf = data;
	leg->xfer.buf = data ? data + ISWI_PAIR_BYTES / 2 : NULL;
	op->twin = leg;
	atomic_init(&op->hedge, 0);
	return leg;
}

bool iswi_hedge_begin(struct iswi_op *op, uint32_t received)
{
	struct isw_engine *e = op->engine;
	const void *from = op->xfer.buf;
	struct iswi_op *leg;
	uint32_t pair;

	if (!on_backup(e, op->page, op->page + op->pages))
		return false;
	pair = op->pages <= ISWI_PAIR_PAGES ? take_pair(e) : ISWI_NONE;
	if (pair == ISWI_NONE && !take_bare(e))
		return false;
	leg = twin_of(op, pair);
	if (pair != ISWI_NONE)
		memcpy(op->xfer.buf, from, received);
	iswi_count(&e->count.hedged_reads, 1);
	/* From here on the request may end at any time. */
	iswi_backup_read(e, leg);
	return true;
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
	uint32_t pair = take_pair(e);
	struct iswi_op *leg;

	if (pair == ISWI_NONE)
		return false;
	leg = twin_of(op, pair);
	leg->measured_ns = measured_ns;
	leg->xfer.slow = backup_leg_slow;
	/* Of a measurement the donor's answer is expected sooner. */
	leg->xfer.slow_us = iswi_backup_slow_after_us(e, op->pages);
	if (measured_ns)
		leg->xfer.slow_us = ISWI_MIN(leg->xfer.slow_us, e->config.hedge_us_min);
	op->last = true;
	iswi_backup_read(e, leg);
	return true;
}

/* ------------------------------------------------------------------ the legs' ends */

/* The leg's bytes are right; seals_out: with what they were compared, page by page. */
static bool verified(struct isw_engine *e, const struct iswi_op *leg, struct iswi_seal *seals_out)
{
	uint64_t page = leg->page, end = leg->page + leg->pages;
	const unsigned char *data = leg->xfer.buf;
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
	unsigned char *to = iswi_opened_at(leg->req, leg->page);
	const unsigned char *from = leg->xfer.buf;

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
	uint32_t pair = a->slot;

	/* Before their buffers are: there is one for each buffer, no more. */
	iswi_op_give(e, a);
	iswi_op_give(e, b);
	if (pair == ISWI_NONE)
		atomic_fetch_add(&e->bare_free, 1);
	else
		atomic_fetch_or(&e->pairs_free, 1u << pair);
}

/* Neither leg's bytes answer the request: its pages are read again. */
static void read_again(struct iswi_op *lost, uint32_t state)
{
	lost->tried |= ISWI_HEDGED;
	if (state & (ISWI_HEDGE_REMOTE_FAIL | ISWI_HEDGE_BACKUP_FAIL))
		lost->tried |= ISWI_UNREACHED;
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
	struct iswi_seal seals[ISWI_XFER_PAGES_MAX];
	atomic_uint *hedge = remote ? &op->hedge : &twin->hedge;
	uint32_t bits = remote ? ISWI_HEDGE_REMOTE_END : ISWI_HEDGE_BACKUP_END, state;
	bool dropped = remote && is_bare(op), won, again = false;

	if (error)
		bits |= remote ? ISWI_HEDGE_REMOTE_FAIL : ISWI_HEDGE_BACKUP_FAIL;
	if (error && !remote)
		iswi_count(&e->count.backup_errors, 1);
	if (!remote && twin->last && !op->slow) { /* the donor was not asked */
		iswi_place_put(e, twin->slab, twin->place);
		bits |= ISWI_HEDGE_REMOTE_END;
	}
	won = !error && !dropped && !(atomic_load(hedge) & ISWI_HEDGE_WON) &&
	      verified(e, op, seals) && !(atomic_fetch_or(hedge, ISWI_HEDGE_WON) & ISWI_HEDGE_WON);
	if (won) {
		answer(e, op, seals, remote); /* before the twin may give our buffer back */
	} else if (remote && !error && (op->last || dropped)) {
		/* Outdated, or the donor is back: no reason to wait for a slow disk. */
		again = !(atomic_fetch_or(hedge, ISWI_HEDGE_WON) & ISWI_HEDGE_WON);
		lost.tried = dropped ? ISWI_BACK : 0;
	}
	state = atomic_fetch_or(hedge, bits) | bits;
	if ((state & BOTH_ENDED) == BOTH_ENDED) {
		again |= !(state & ISWI_HEDGE_WON);
		release(e, op, twin);
	}
	if (again)
		read_again(&lost, state);
	if (won || again)
		iswi_req_put(e, req);
}
