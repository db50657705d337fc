/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reads. Each page is answered from its best copy; consecutive pages with the same source form
 * one transfer straight into the request's buffer. What arrives is opened there with the page's
 * seal, so neither a write that passed by nor a donor's garbage gets through.
 */
#include <errno.h>
#include <string.h>

#include "engine/ops/ops.h"
#include "engine/state/ahead.h"
#include "engine/state/seal.h"

enum source {
	FROM_NOWHERE,
	FROM_STAGING,
	FROM_ZEROS,
	FROM_AHEAD,
	JOINED, /* comes with what is being read ahead */
	FROM_REMOTE,
	FROM_BACKUP,
	PAST_REMOTE, /* from the backup although the donor has it, which is slow */
	QUICKER,     /* the same, as the backup is thought quicker, or is measured */
	AGAIN,       /* its place was mapped only after we had looked */
	FAILED,
	LOST /* nothing has it, or ever will */
};

struct read_run {
	enum source source;
	uint64_t page;
	uint32_t pages;
	uint32_t place;  /* FROM_REMOTE, QUICKER, PAST_REMOTE: of the slab */
	uint64_t number; /* of its first page's seal */
};

struct cursor {
	struct iswi_req *req;
	uint32_t slab;
	uint64_t word[2]; /* of the slab's places */
	bool mapped[2];   /* a use of that place is held */
	bool avoid[2];    /* its donor keeps others waiting */
	enum iswi_speed_choice choice[2];
	uint8_t tried; /* ISWI_TRIED_* */
	struct iswi_op *first, *last;
};

static unsigned char *place_of(struct iswi_req *req, uint64_t page)
{
	return (unsigned char *)req->data + (page * ISW_PAGE_BYTES - req->offset);
}

/*
 * Under the shard lock: every source that should have the page was read, and what came from each is
 * not the page. A donor or a disk that gave nothing may give it another time.
 */
static bool is_damaged(const struct isw_engine *e, uint64_t page, const struct cursor *at)
{
	uint8_t sources = 0;

	if (iswi_bit(e->remote_valid, page))
		sources |= iswi_tried_place(iswi_place_at(e, page));
	if (e->has_backup && iswi_bit(e->backup_current, page))
		sources |= ISWI_TRIED_BACKUP;
	return sources && (at->tried & (sources | ISWI_UNREACHED)) == sources;
}

/* Under the shard lock: where the page's newest bytes are. */
static enum source choose(struct isw_engine *e, uint64_t page, const struct cursor *at,
			  uint32_t *slot_out)
{
	struct iswi_entry *entry = iswi_entry_find(e, page);
	uint32_t place = iswi_place_at(e, page);
	bool remote = iswi_bit(e->remote_valid, page) && !(at->tried & iswi_tried_place(place));

	*slot_out = entry ? iswi_entry_newest(e, entry) : ISWI_NONE;
	if (*slot_out != ISWI_NONE)
		return FROM_STAGING;
	if (!at->tried) {
		enum iswi_ahead_found found = iswi_ahead_get(e, at->req, page);

		if (found == ISWI_AHEAD_HAD || found == ISWI_AHEAD_JOINED)
			return found == ISWI_AHEAD_HAD ? FROM_AHEAD : JOINED;
		if (found == ISWI_AHEAD_SLOW && iswi_bit(e->backup_current, page))
			return PAST_REMOTE;
	}
	if (remote && at->mapped[place]) {
		if (!iswi_bit(e->backup_current, page) || at->tried & ISWI_TRIED_BACKUP)
			return FROM_REMOTE;
		if (at->avoid[place])
			return PAST_REMOTE;
		return iswi_speed_is_backup(at->choice[place]) ? QUICKER : FROM_REMOTE;
	}
	if (iswi_bit(e->backup_current, page) && e->has_backup && !(at->tried & ISWI_TRIED_BACKUP))
		return FROM_BACKUP;
	if (remote &&
	    iswi_word_state(atomic_load(&iswi_place(e, at->slab, place)->word)) == ISW_SLAB_MAPPED)
		return AGAIN;
	if (is_damaged(e, page, at))
		return LOST;
	if (iswi_bit(e->remote_valid, page))
		return FAILED;
	if (iswi_bit(e->backup_current, page))
		return e->has_backup ? FAILED : LOST;
	return FROM_ZEROS;
}

static void count_fallback(struct isw_engine *e, const struct cursor *at,
			   const struct read_run *run)
{
	uint32_t current = atomic_load(&e->slabs[at->slab].current), pages = run->pages;
	uint32_t state = iswi_word_state(atomic_load(&iswi_place(e, at->slab, current)->word));

	if (run->source == PAST_REMOTE)
		iswi_count(&e->count.fallback_slow, pages);
	else if (at->tried & ISWI_TRIED_REMOTE)
		iswi_count(&e->count.fallback_error, pages);
	else if (at->mapped[current])
		iswi_count(&e->count.fallback_invalid, pages);
	else if (state == ISW_SLAB_SUSPENDED)
		iswi_count(&e->count.fallback_suspended, pages);
	else
		iswi_count(&e->count.fallback_unmapped, pages);
}

static void read_pages(struct isw_engine *e, struct iswi_req *req, uint64_t page, uint64_t end,
		       uint8_t tried, struct iswi_plug *plug);
static void remote_read_done(struct iswi_xfer *xfer, int error);
static void remote_read_slow(struct iswi_xfer *xfer, uint32_t received);
static void backup_read_done(struct iswi_op *op, int error);
static void in_vain(struct iswi_op *op, int error);

/* The read measures its source, if that is what it was sent there for: since when, or 0. */
static uint64_t measure(struct iswi_speed *speed, const struct cursor *at,
			const struct read_run *run, enum iswi_speed_choice choice)
{
	uint64_t now_ns = ISWI_MAX(at->req->start_ns, 1);

	return at->choice[run->place] == choice && iswi_speed_measure(speed, now_ns) ? now_ns : 0;
}

static struct iswi_op *op_of(struct isw_engine *e, const struct cursor *at,
			     const struct read_run *run)
{
	struct iswi_op *op = iswi_op_take(e);

	atomic_fetch_add_explicit(&at->req->pending, 1, memory_order_relaxed);
	atomic_store_explicit(&at->req->waited, true, memory_order_relaxed);
	op->req = at->req;
	op->page = run->page;
	op->pages = run->pages;
	op->slab = at->slab;
	op->tried = at->tried;
	op->number = run->number;
	op->xfer.buf = place_of(at->req, run->page);
	return op;
}

static struct iswi_op *remote_op_of(struct isw_engine *e, const struct cursor *at,
				    const struct read_run *run)
{
	struct iswi_op *op = op_of(e, at, run);

	op->place = (uint8_t)run->place;
	op->word = at->word[run->place];
	op->xfer.kind = ISWI_XFER_READ;
	op->xfer.done = remote_read_done;
	op->xfer.slow = remote_read_slow;
	iswi_place_get_more(e, at->slab, run->place);
	return op;
}

static void emit_backup(struct isw_engine *e, const struct cursor *at, const struct read_run *run)
{
	struct iswi_op *op = op_of(e, at, run);

	count_fallback(e, at, run);
	op->done = backup_read_done;
	iswi_backup_read(e, op);
}

/*
 * A read whose donor's answer was dropped waits for twice as long as before, so that a donor which
 * is always slow answers it in the end.
 */
static uint32_t slow_after_us(const struct isw_engine *e, const struct cursor *at,
			      const struct iswi_remote *r)
{
	uint32_t us = iswi_remote_slow_after_us(e, r);
	uint64_t age_ns;

	if (!us || !at->tried)
		return us;
	age_ns = e->clock->now_ns(e->clock->ctx) - at->req->start_ns;
	return (uint32_t)ISWI_MAX(us, age_ns / 500);
}

static void send_remote(struct isw_engine *e, struct cursor *at, const struct read_run *run,
			struct iswi_op *op)
{
	struct iswi_remote *r = iswi_remote_of(e, at->slab, run->place);

	/* Once: what goes wrong after that is read again without a second leg. */
	if (!at->tried || at->tried == (ISWI_HEDGED | ISWI_BACK))
		op->xfer.slow_us = slow_after_us(e, at, r);
	op->measured_ns = measure(&r->speed, at, run, ISWI_SPEED_DONOR_MEASURED);
	/* Measured, or beside what is: its tail is nothing to wait for, the backup is quicker. */
	if (at->choice[run->place] == ISWI_SPEED_DONOR_MEASURED)
		op->xfer.slow_us = e->config.hedge_us_min;
	if (at->last)
		at->last->xfer.next = &op->xfer;
	else
		at->first = op;
	at->last = op;
}

/* In parts that have buffers for both legs; what finds none is read from its donor. */
static void emit_quicker(struct isw_engine *e, struct cursor *at, const struct read_run *run)
{
	struct read_run part = *run;
	uint64_t end = run->page + run->pages;

	for (; part.page < end; part.page += part.pages) {
		struct iswi_speed *speed = &e->backup->speed;
		uint64_t measured_ns;
		struct iswi_op *op;

		part.pages = (uint32_t)ISWI_MIN(end - part.page, ISWI_PAIR_PAGES);
		op = remote_op_of(e, at, &part);
		op->done = in_vain;
		measured_ns = measure(speed, at, &part, ISWI_SPEED_BACKUP_MEASURED);
		if ((measured_ns || at->choice[part.place] == ISWI_SPEED_BACKUP) &&
		    iswi_hedge_backup_first(op, measured_ns))
			continue;
		if (measured_ns)
			iswi_speed_measured(speed, measured_ns, measured_ns);
		send_remote(e, at, &part, op);
	}
}

/* Once: what goes wrong after that is read again from one source after the other. */
static bool has_second_leg(const struct cursor *at, const struct read_run *run)
{
	return at->mapped[run->place] &&
	       (!at->tried || at->tried == (ISWI_HEDGED | ISWI_PAST_SLOW));
}

/* From the backup, but the donor, slow as it is, may still be sooner than a disk that hangs. */
static void emit_past(struct isw_engine *e, struct cursor *at, const struct read_run *run)
{
	struct read_run part = *run;
	uint64_t end = run->page + run->pages;

	for (; part.page < end; part.page += part.pages) {
		struct iswi_op *op;

		part.pages = (uint32_t)ISWI_MIN(end - part.page, ISWI_PAIR_PAGES);
		op = remote_op_of(e, at, &part);
		op->done = in_vain;
		op->tried |= ISWI_PAST_SLOW;
		if (iswi_hedge_backup_first(op, 0))
			continue;
		iswi_op_give(e, op);
		iswi_place_put(e, at->slab, part.place);
		atomic_fetch_sub(&at->req->pending, 1); /* not the last one: see AGAIN */
		part.pages = (uint32_t)(end - part.page);
		emit_backup(e, at, &part);
	}
}

/* Far memory must know: it waits for what failed, and gives up what is lost. */
static void fail_lost(struct iswi_req *req)
{
	iswi_req_fail(req, req->flags & ISWI_REQ_FAR ? -ENODATA : -EIO);
}

static void emit(struct isw_engine *e, struct cursor *at, const struct read_run *run)
{
	switch (run->source) {
	case FROM_NOWHERE:
		return;
	case JOINED:
		atomic_store_explicit(&at->req->waited, true, memory_order_relaxed);
		return;
	case FROM_AHEAD:
		iswi_ahead_used(e, run->pages);
		return;
	case FROM_STAGING:
		iswi_count(&e->count.pages_in_staging, run->pages);
		return;
	case FROM_ZEROS:
		memset(iswi_opened_at(at->req, run->page), 0, (size_t)run->pages * ISW_PAGE_BYTES);
		iswi_count(&e->count.pages_in_zero, run->pages);
		return;
	case AGAIN:
		/* The caller holds one of the request's pending. */
		read_pages(e, at->req, run->page, run->page + run->pages, at->tried, NULL);
		return;
	case FAILED:
		iswi_req_fail(at->req, -EIO);
		return;
	case LOST:
		fail_lost(at->req);
		return;
	case FROM_REMOTE:
		send_remote(e, at, run, remote_op_of(e, at, run));
		return;
	case PAST_REMOTE:
		if (has_second_leg(at, run)) {
			emit_past(e, at, run);
			return;
		}
		/* fall through */
	case FROM_BACKUP:
		emit_backup(e, at, run);
		return;
	case QUICKER:
		emit_quicker(e, at, run);
	}
}

/* Pages of one group that were copied out of staging as they are there. */
struct staged {
	uint32_t pages;                           /* a bit for each */
	struct iswi_seal seals[ISWI_GROUP_PAGES]; /* of a device that seals */
};

/*
 * Under the shard lock, as staging may be given back right after it. So nothing is written here to
 * memory of others, which may keep the writer waiting.
 */
static void copy_staged(struct isw_engine *e, struct iswi_req *req, uint64_t page, uint32_t slot,
			struct staged *staged)
{
	memcpy(place_of(req, page), e->staging + (uint64_t)slot * ISW_PAGE_BYTES, ISW_PAGE_BYTES);
	if (iswi_sealed(e))
		staged->seals[page % ISWI_GROUP_PAGES] = e->slots[slot].seal;
	staged->pages |= 1u << page % ISWI_GROUP_PAGES;
}

/* What was staged is the only copy, so bytes that do not open are an error. */
static void open_staged(struct isw_engine *e, struct iswi_req *req, uint64_t group,
			const struct staged *staged)
{
	for (uint32_t left = staged->pages; left; left &= left - 1) {
		uint32_t i = (uint32_t)__builtin_ctz(left);
		uint64_t page = group * ISWI_GROUP_PAGES + i;
		unsigned char *from = place_of(req, page), *to = iswi_opened_at(req, page);

		if (iswi_sealed(e) && !iswi_seal_open(e, page, &staged->seals[i], from, to))
			fail_lost(req);
		else if (!iswi_sealed(e) && to != from)
			memcpy(to, from, ISW_PAGE_BYTES);
	}
}

/* Classifies the pages of one group; runs that end inside it are emitted without the lock. */
static void read_group(struct isw_engine *e, struct cursor *at, uint64_t page, uint64_t end,
		       struct read_run *open)
{
	struct read_run ended[ISWI_GROUP_PAGES];
	uint32_t ended_count = 0;
	uint64_t group = page / ISWI_GROUP_PAGES;
	struct staged staged = {.pages = 0};
	struct iswi_shard *shard = iswi_shard_of(e, page);

	pthread_mutex_lock(&shard->lock);
	for (; page < end; page++) {
		uint32_t slot;
		enum source source = choose(e, page, at, &slot);

		if (source == FROM_STAGING)
			copy_staged(e, at->req, page, slot, &staged);
		if (open->source != source ||
		    ((source == FROM_REMOTE || source == QUICKER || source == PAST_REMOTE) &&
		     (page % ISWI_STRIPE_PAGES == 0 || open->place != iswi_place_at(e, page)))) {
			ended[ended_count++] = *open;
			*open = (struct read_run){
				.source = source,
				.page = page,
				.place = iswi_place_at(e, page),
				.number = iswi_seal_number(e, page),
			};
		}
		open->pages++;
	}
	pthread_mutex_unlock(&shard->lock);
	open_staged(e, at->req, group, &staged);
	for (uint32_t i = 0; i < ended_count; i++)
		emit(e, at, &ended[i]);
}

/* Reads pages of one slab; the caller holds the request's guard or an op of it. */
static void read_pages(struct isw_engine *e, struct iswi_req *req, uint64_t page, uint64_t end,
		       uint8_t tried, struct iswi_plug *plug)
{
	struct cursor at = {.req = req, .slab = (uint32_t)(page / e->slab_pages), .tried = tried};
	struct read_run open = {.source = FROM_NOWHERE};

	for (uint32_t place = 0; place < 2; place++) {
		at.mapped[place] = iswi_place_get(e, at.slab, place, &at.word[place]);
		/* After a hedge in vain a donor that has not failed has answered: it is back. */
		at.avoid[place] = at.mapped[place] && e->has_backup &&
				  (tried & ISWI_PAST_SLOW ||
				   (!(tried & ISWI_HEDGED) &&
				    iswi_remote_avoid(iswi_remote_of(e, at.slab, place))));
		if (at.mapped[place] && !tried)
			at.choice[place] = iswi_quicker(e, iswi_remote_of(e, at.slab, place),
							(uint32_t)(end - page), req->start_ns);
	}
	if (!tried && e->config.flags & ISW_ENGINE_QUICKER && iswi_has_others(e))
		iswi_pace_note(&e->pace, (uint32_t)(end - page),
			       iswi_speed_is_backup(at.choice[0]) ||
				       iswi_speed_is_backup(at.choice[1]),
			       req->start_ns);
	while (page < end) {
		uint64_t stop = iswi_group_end(page, end);

		read_group(e, &at, page, stop, &open);
		page = stop;
	}
	emit(e, &at, &open);
	if (at.first)
		iswi_remote_send(e, at.first, at.last, plug);
	for (uint32_t place = 0; place < 2; place++)
		if (at.mapped[place])
			iswi_place_put(e, at.slab, place);
}

void iswi_read(struct isw_engine *e, struct iswi_req *req, struct iswi_plug *plug)
{
	uint64_t first = req->offset / ISW_PAGE_BYTES, page = first;
	uint64_t end = page + req->length / ISW_PAGE_BYTES;

	iswi_count(&e->count.pages_in, end - page);
	while (page < end) {
		uint64_t slab = page / e->slab_pages;
		uint64_t stop = ISWI_MIN((slab + 1) * e->slab_pages, end);

		iswi_count(&e->slabs[slab].page_ins, stop - page);
		read_pages(e, req, page, stop, 0, plug);
		page = stop;
	}
	iswi_req_put(e, req);
	iswi_ahead_note(e, first, end, plug, in_vain);
}

/* Under the shard lock: whether a source has the page that answers now. Of zeros all have it. */
static bool is_found(struct isw_engine *e, uint64_t page, const bool mapped[2])
{
	const struct iswi_entry *entry = iswi_entry_find(e, page);
	bool remote = iswi_bit(e->remote_valid, page), backup = iswi_bit(e->backup_current, page);

	if (entry && iswi_entry_newest(e, entry) != ISWI_NONE)
		return true;
	return (remote && mapped[iswi_place_at(e, page)]) || (backup && e->has_backup) ||
	       (!remote && !backup);
}

static bool are_found(struct isw_engine *e, uint64_t page, uint64_t end, const bool mapped[2])
{
	bool found = true;

	while (found && page < end) {
		struct iswi_shard *shard = iswi_shard_of(e, page);
		uint64_t stop = iswi_group_end(page, end);

		pthread_mutex_lock(&shard->lock);
		for (; found && page < stop; page++)
			found = is_found(e, page, mapped);
		pthread_mutex_unlock(&shard->lock);
	}
	return found;
}

void iswi_confirm(struct isw_engine *e, struct iswi_req *req)
{
	uint64_t page = req->offset / ISW_PAGE_BYTES, end = page + req->length / ISW_PAGE_BYTES;
	bool found = true;

	while (found && page < end) {
		uint32_t slab = (uint32_t)(page / e->slab_pages);
		uint64_t stop = ISWI_MIN((slab + 1ull) * e->slab_pages, end);
		bool mapped[2];
		uint64_t word;

		for (uint32_t place = 0; place < 2; place++)
			mapped[place] = iswi_place_get(e, slab, place, &word);
		found = are_found(e, page, stop, mapped);
		for (uint32_t place = 0; place < 2; place++)
			if (mapped[place])
				iswi_place_put(e, slab, place);
		page = stop;
	}
	if (!found)
		iswi_req_fail(req, -EIO);
	iswi_req_put(e, req);
}

/*
 * The bytes of a page do not match its seal. The first time it may be a write that went by
 * while they travelled, so the page is read again; the second time the source is not believed.
 */
static uint8_t mismatch(struct isw_engine *e, const struct iswi_op *op, uint64_t page, bool remote)
{
	struct iswi_shard *shard = iswi_shard_of(e, page);
	uint8_t source = remote ? iswi_tried_place(op->place) : ISWI_TRIED_BACKUP;
	const atomic_uint *bits = remote ? e->remote_valid : e->backup_current;
	struct iswi_entry *entry;
	bool believed;

	if (!(op->tried & ISWI_RETRIED))
		return op->tried | ISWI_RETRIED;
	pthread_mutex_lock(&shard->lock);
	entry = iswi_entry_find(e, page);
	/* A page that is read again goes alone: op->number is its seal's when it was asked for. */
	believed = iswi_bit(bits, page) && (!remote || iswi_place_at(e, page) == op->place) &&
		   (!entry || !entry->version) && iswi_seal_number(e, page) == op->number;
	/* Kept when it is the only copy: then each read says error, never zeros. */
	if (believed && remote && e->has_backup && iswi_bit(e->backup_current, page))
		iswi_remote_valid_clear(e, page);
	pthread_mutex_unlock(&shard->lock);
	if (!believed)
		return op->tried; /* it was rewritten meanwhile, once more */
	iswi_count(remote ? &e->count.crc_errors_remote : &e->count.crc_errors_backup, 1);
	iswi_events_put(&e->events, &(struct isw_event){
					    .kind = ISW_EVENT_BAD_PAGE,
					    .slab = op->slab,
					    .remote = remote ? op->remote : ISW_NO_REMOTE,
					    .code = remote ? 1 : 0,
					    .value = page,
				    });
	/* The other source deserves its own benefit of the doubt. */
	return (op->tried | source) & (uint8_t)~ISWI_RETRIED;
}

/* Opens what arrived, page by page; reads again what cannot be believed. */
static void verify(struct isw_engine *e, const struct iswi_op *op, bool remote)
{
	uint64_t page = op->page, end = op->page + op->pages, good = op->pages;

	while (page < end) {
		uint32_t count = (uint32_t)(iswi_group_end(page, end) - page);
		uint32_t wrong = iswi_pages_open(e, place_of(op->req, page),
						 iswi_opened_at(op->req, page), page, count);

		for (uint32_t i = 0; wrong; i++, wrong >>= 1) {
			if (!(wrong & 1))
				continue;
			good--;
			read_pages(e, op->req, page + i, page + i + 1,
				   mismatch(e, op, page + i, remote), NULL);
		}
		page += count;
	}
	iswi_count(remote ? &e->count.pages_in_remote : &e->count.pages_in_backup, good);
}

/* Its pages are read again, by who holds one of the request's pending. */
static void read_again(struct isw_engine *e, const struct iswi_op *op, uint8_t tried)
{
	read_pages(e, op->req, op->page, op->page + op->pages, tried, NULL);
}

static void remote_read_done(struct iswi_xfer *xfer, int error)
{
	struct iswi_op *op = ISWI_CONTAINER(xfer, struct iswi_op, xfer);
	struct isw_engine *e = op->engine;
	struct iswi_op ended;

	if (op->twin) {
		iswi_remote_ended(e, op, error);
		iswi_hedge_ended(op, true, error);
		return;
	}
	ended = *op;
	/* Given back before its pages are read again: there is one op for each page, no more. */
	iswi_op_give(e, op);
	iswi_remote_ended(e, &ended, error);
	if (error)
		read_again(e, &ended, ended.tried | iswi_tried_place(ended.place) | ISWI_UNREACHED);
	else
		verify(e, &ended, true);
	iswi_req_put(e, ended.req);
}

/* Neither leg of a hedged read, or no read ahead, has brought these pages: they are read again. */
static void in_vain(struct iswi_op *op, int error)
{
	(void)error;
	read_again(op->engine, op, op->tried);
}

static void remote_read_slow(struct iswi_xfer *xfer, uint32_t received)
{
	struct iswi_op *op = ISWI_CONTAINER(xfer, struct iswi_op, xfer);

	uint64_t for_ns = iswi_remote_note_slow(op->engine, op);

	op->done = in_vain;
	/* Now the backup lacks a page, which is on its way there, or there are hedges enough. */
	if (!iswi_hedge_begin(op, received))
		xfer->slow_us = (uint32_t)ISWI_MAX(for_ns / 500, op->engine->config.hedge_us_min);
}

static void backup_read_done(struct iswi_op *op, int error)
{
	struct isw_engine *e = op->engine;
	struct iswi_op ended = *op;
	/* Linux says so of a medium that has not kept what was written, and of nothing else. */
	bool is_gone = error == -ENODATA || error == -EILSEQ;

	iswi_op_give(e, op); /* see remote_read_done */
	if (error) {
		iswi_count(&e->count.backup_errors, 1);
		read_again(e, &ended,
			   ended.tried | ISWI_TRIED_BACKUP | (is_gone ? 0 : ISWI_UNREACHED));
	} else {
		verify(e, &ended, false);
	}
	iswi_req_put(e, ended.req);
}
