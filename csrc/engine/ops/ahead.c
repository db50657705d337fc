/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading ahead. Where the reads of late have a trend (state/trend.h), the pages that come next are
 * read from their donor before anybody asks for them, a group at a time, into buffers of their own:
 * no request ever waits for one of these. Then they are
 *
 *   being read   A use of the slab's place is held, as for any read. A request for such a page
 *                joins: it waits for this transfer, unless that is slow.
 *   at rest      Bytes that were right when they came. They are no entry, no use of a place and no
 *                activity of the slab, so they hold up neither copies nor evictions.
 *
 * A page read ahead is had once. Credit keeps wrong guesses few: each page that is read takes four,
 * each that is then asked for gives five, so one in five may be in vain. Without credit there is a
 * try every now and then.
 */
#include <errno.h>

#include "engine/ops/ops.h"
#include "engine/state/ahead.h"
#include "engine/state/seal.h"

/* From a stream's last request to the end of what is read ahead for it. */
#define DEPTH_PAGES 64u
/* What was read ahead ends further away: the stream has leapt. */
#define LEAP_PAGES (DEPTH_PAGES + ISWI_GROUP_PAGES)
/* Groups that one request begins to read. */
#define WISHES_MAX 4u
#define CREDIT_MAX (4 * ISWI_AHEAD_CREDIT_FIRST)

/* Pages of one group and one slab, to be read into a group that was taken for them. */
struct wish {
	struct iswi_ahead_group *to;
	uint64_t page, end;
};

/* -------------------------------------------------------------------------- what to read */

/* What the stream wants next; false: nothing. */
static bool next_pages(const struct isw_engine *e, struct iswi_stream *s, struct wish *wish_out)
{
	uint64_t slab, page, end;

	if (s->trend > 0) {
		if (s->ahead < s->end || s->ahead > s->end + LEAP_PAGES)
			s->ahead = s->end;
		page = s->ahead;
		if (page >= s->end + DEPTH_PAGES || page >= iswi_far_page(e))
			return false;
		slab = page / e->slab_pages;
		end = ISWI_MIN(iswi_group_end(page, iswi_far_page(e)), (slab + 1) * e->slab_pages);
	} else {
		if (s->ahead > s->page || s->ahead + LEAP_PAGES < s->page)
			s->ahead = s->page;
		end = s->ahead;
		if (end + DEPTH_PAGES <= s->page || !end)
			return false;
		slab = (end - 1) / e->slab_pages;
		page = (end - 1) / ISWI_GROUP_PAGES * ISWI_GROUP_PAGES;
		page = ISWI_MAX(page, slab * e->slab_pages);
	}
	wish_out->page = page;
	wish_out->end = end;
	return true;
}

static bool has_credit(struct iswi_ahead *a)
{
	if (atomic_load_explicit(&a->credit, memory_order_relaxed) > 0)
		return true;
	atomic_fetch_add_explicit(&a->credit, ISWI_AHEAD_PAGE_TAKES, memory_order_relaxed);
	return false;
}

/* Under ahead.lock. */
static bool next_wish(struct isw_engine *e, struct iswi_stream *s, struct wish *wish_out)
{
	struct iswi_ahead *a = e->ahead;

	if (!next_pages(e, s, wish_out) || !has_credit(a))
		return false;
	wish_out->to = &a->groups[a->turn];
	a->turn = (a->turn + 1) % ISWI_AHEAD_GROUPS;
	if (wish_out->to->taken)
		return false;
	wish_out->to->taken = true;
	s->ahead = s->trend > 0 ? wish_out->end : wish_out->page;
	return true;
}

static void give_back(struct isw_engine *e, struct iswi_ahead_group *g)
{
	pthread_mutex_lock(&e->ahead->lock);
	g->taken = false;
	pthread_mutex_unlock(&e->ahead->lock);
}

/* ------------------------------------------------------------------------------- reading */

static void ahead_done(struct iswi_xfer *xfer, int error);
static void ahead_slow(struct iswi_xfer *xfer, uint32_t received);

static void forget(struct isw_engine *e, struct iswi_ahead_group *g)
{
	struct iswi_shard *shard = iswi_shard_of(e, g->group * ISWI_GROUP_PAGES);

	if (!g->listed)
		return;
	pthread_mutex_lock(&shard->lock);
	iswi_ahead_unlist(e, g);
	pthread_mutex_unlock(&shard->lock);
}

/* Under the shard lock: the pages that are at rest at that place, and nowhere else. */
static uint32_t lacking(struct isw_engine *e, const struct wish *wish, uint32_t place)
{
	uint32_t pages = 0;

	for (uint64_t page = wish->page; page < wish->end; page++)
		if (iswi_bit(e->remote_valid, page) && iswi_place_at(e, page) == place &&
		    !iswi_entry_find(e, page) && !iswi_ahead_has(e, page))
			pages |= iswi_ahead_bit(page);
	return pages;
}

/* From now on these pages are being read. Their group forgets others only for them. */
static uint32_t claim(struct isw_engine *e, const struct wish *wish, uint32_t place)
{
	struct iswi_shard *shard = iswi_shard_of(e, wish->page);
	uint32_t pages;

	pthread_mutex_lock(&shard->lock);
	pages = lacking(e, wish, place);
	pthread_mutex_unlock(&shard->lock);
	if (!pages)
		return 0;
	forget(e, wish->to);
	pthread_mutex_lock(&shard->lock);
	pages = lacking(e, wish, place);
	if (pages)
		iswi_ahead_list(e, wish->to, wish->page / ISWI_GROUP_PAGES, pages);
	pthread_mutex_unlock(&shard->lock);
	return pages;
}

/* The read of a wish, by who has taken its group; NULL: there is nothing to read. */
static struct iswi_op *begin(struct isw_engine *e, const struct wish *wish)
{
	uint32_t slab = (uint32_t)(wish->page / e->slab_pages), pages = 0, first;
	uint64_t now_ns = e->clock->now_ns(e->clock->ctx);
	enum iswi_speed_choice choice;
	struct iswi_remote *r;
	struct iswi_use use;
	struct iswi_op *op;

	if (!iswi_slab_get(e, slab, &use)) {
		give_back(e, wish->to);
		return NULL;
	}
	r = iswi_remote_of(e, slab, use.place);
	choice = iswi_quicker(e, r, (uint32_t)(wish->end - wish->page), now_ns);
	if (!iswi_remote_avoid(r) && choice != ISWI_SPEED_BACKUP)
		pages = claim(e, wish, use.place);
	if (!pages) {
		iswi_place_put(e, slab, use.place);
		give_back(e, wish->to);
		return NULL;
	}
	iswi_count(&e->count.pages_ahead, (uint32_t)__builtin_popcount(pages));
	atomic_fetch_sub_explicit(&e->ahead->credit,
				  __builtin_popcount(pages) * ISWI_AHEAD_PAGE_TAKES,
				  memory_order_relaxed);
	first = (uint32_t)__builtin_ctz(pages);
	op = iswi_op_take(e);
	op->page = wish->page / ISWI_GROUP_PAGES * ISWI_GROUP_PAGES + first;
	op->pages = ISWI_GROUP_PAGES - (uint32_t)__builtin_clz(pages) - first;
	op->slab = slab;
	op->place = (uint8_t)use.place; /* which it has from now on */
	op->slot = (uint32_t)(wish->to - e->ahead->groups);
	op->xfer.kind = ISWI_XFER_READ;
	op->xfer.buf = iswi_ahead_data(wish->to, op->page);
	op->xfer.done = ahead_done;
	op->xfer.slow = ahead_slow;
	op->xfer.slow_us = iswi_remote_slow_after_us(e, r);
	if (choice == ISWI_SPEED_DONOR_MEASURED && iswi_speed_measure(&r->speed, now_ns)) {
		op->measured_ns = now_ns;
		op->xfer.slow_us = e->config.hedge_us_min;
	}
	return op;
}

void iswi_ahead_note(struct isw_engine *e, uint64_t page, uint64_t end, struct iswi_plug *plug,
		     void (*in_vain)(struct iswi_op *op, int error))
{
	struct iswi_ahead *a = e->ahead;
	struct wish wishes[WISHES_MAX];
	struct iswi_op *first = NULL, *last = NULL;
	struct iswi_stream *s;
	uint32_t count = 0;

	if (!a || page >= iswi_far_page(e))
		return;
	pthread_mutex_lock(&a->lock);
	s = iswi_trend_note(a->streams, ISWI_AHEAD_STREAMS, ++a->requests, page, end);
	while (s->trend && count < WISHES_MAX && next_wish(e, s, &wishes[count]))
		count++;
	pthread_mutex_unlock(&a->lock);
	for (uint32_t i = 0; i < count; i++) {
		struct iswi_op *op = begin(e, &wishes[i]);

		if (!op)
			continue;
		op->done = in_vain;
		if (last)
			last->xfer.next = &op->xfer;
		else
			first = op;
		last = op;
	}
	if (first)
		iswi_remote_send(e, first, last, plug);
}

/* ------------------------------------------------------------------------------- the end */

void iswi_ahead_used(struct isw_engine *e, uint32_t pages)
{
	atomic_int *credit = &e->ahead->credit;

	iswi_count(&e->count.pages_in_remote, pages);
	iswi_count(&e->count.pages_ahead_used, pages);
	if (atomic_load_explicit(credit, memory_order_relaxed) < CREDIT_MAX)
		atomic_fetch_add_explicit(credit, (int)pages * ISWI_AHEAD_PAGE_GIVES,
					  memory_order_relaxed);
}

/* Under the shard lock: of what has come, only right bytes are kept. */
static void keep_right(struct isw_engine *e, struct iswi_ahead_group *g, const struct iswi_op *op,
		       uint32_t wrong)
{
	for (uint32_t i = 0; i < op->pages; i++) {
		uint64_t page = op->page + i;

		if (!(g->pages & iswi_ahead_bit(page)) || !(wrong >> i & 1))
			continue;
		g->pages &= ~iswi_ahead_bit(page);
		/* Only counted: a read, which looks a second time, judges the donor. */
		iswi_count(&e->count.crc_errors_remote, 1);
		iswi_count(&e->count.pages_ahead_wasted, 1);
	}
}

/* A wait is over. What it did not get (a bit for each page of the group) is read again. */
static void end_wait(const struct iswi_op *op, const struct iswi_ahead_wait *wait, uint32_t missing,
		     uint8_t tried)
{
	uint64_t page = wait->page, end = page + wait->pages;

	while (page < end) {
		struct iswi_op rest = iswi_op_rest(op);

		rest.req = wait->req;
		rest.tried = tried;
		for (rest.page = page; page < end && missing & iswi_ahead_bit(page); page++)
			;
		rest.pages = (uint32_t)(page - rest.page);
		if (rest.pages)
			rest.done(&rest, -EIO);
		else
			page++;
	}
	iswi_req_put(op->engine, wait->req);
}

static void ahead_done(struct iswi_xfer *xfer, int error)
{
	struct iswi_op *taken = ISWI_CONTAINER(xfer, struct iswi_op, xfer), op = *taken;
	struct isw_engine *e = op.engine;
	struct iswi_ahead_group *g = &e->ahead->groups[op.slot];
	struct iswi_shard *shard = iswi_shard_of(e, op.page);
	struct iswi_ahead_wait waits[ISWI_AHEAD_WAITS];
	uint32_t wrong = 0, missing[ISWI_AHEAD_WAITS], count;

	iswi_op_give(e, taken);
	if (!error)
		wrong = iswi_pages_open(e, op.xfer.buf, op.xfer.buf, op.page, op.pages);
	pthread_mutex_lock(&shard->lock);
	if (error)
		iswi_ahead_unlist(e, g);
	else
		keep_right(e, g, &op, wrong);
	count = iswi_ahead_rest(g, waits, missing);
	pthread_mutex_unlock(&shard->lock);
	give_back(e, g);
	iswi_remote_ended(e, &op, error);
	for (uint32_t w = 0; w < count; w++) {
		iswi_ahead_used(e, waits[w].pages - (uint32_t)__builtin_popcount(missing[w]));
		end_wait(&op, &waits[w], missing[w],
			 error ? iswi_tried_place(op.place) | ISWI_UNREACHED : 0);
	}
}

/* Who waits for a slow donor reads from the backup what that has; so does who comes later. */
static void ahead_slow(struct iswi_xfer *xfer, uint32_t received)
{
	struct iswi_op *op = ISWI_CONTAINER(xfer, struct iswi_op, xfer);
	struct isw_engine *e = op->engine;
	struct iswi_ahead_group *g = &e->ahead->groups[op->slot];
	struct iswi_shard *shard = iswi_shard_of(e, op->page);
	struct iswi_ahead_wait waits[ISWI_AHEAD_WAITS];
	uint32_t count;

	(void)received;
	(void)iswi_remote_note_slow(e, op);
	pthread_mutex_lock(&shard->lock);
	g->slow = true;
	count = iswi_ahead_release(g, waits);
	pthread_mutex_unlock(&shard->lock);
	for (uint32_t w = 0; w < count; w++)
		end_wait(op, &waits[w], UINT32_MAX, ISWI_HEDGED | ISWI_PAST_SLOW);
}
