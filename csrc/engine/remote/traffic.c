/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What goes over a remote's connections, and how long its reads take.
 *
 * How long is long: read_tail_ns follows about the 99th percentile. An answer above it raises it
 * by 1/8 at most, one below lowers it by 1/1024, so it stays where one answer in 129 is above. All
 * those that were waited for at the same time raise it once: after a donor hung for seconds, what
 * it then answers at once does not hide that the next hang is one.
 */
#include "engine/remote/remote.h"
#include "engine/state/arena.h"

#define TAIL_FACTOR         4u
#define TAIL_RAISE          8u
#define TAIL_LOWER          1024u
#define TAIL_NS_FIRST       1000000u /* of the first answer, which may have waited for anything */
#define AFTER_MIN_TIMES_MAX 50u /* the longest wait for a donor, as a multiple of hedge_us_min */

uint32_t iswi_remote_slow_after_us(const struct isw_engine *e, const struct iswi_remote *r)
{
	uint64_t min_us = e->config.hedge_us_min;
	uint64_t us = iswi_counted(&r->read_tail_ns) * TAIL_FACTOR / 1000;

	if (!min_us || !e->has_backup)
		return 0;
	us = ISWI_MIN(ISWI_MAX(us, min_us), min_us * AFTER_MIN_TIMES_MAX);
	return (uint32_t)ISWI_MIN(us, UINT32_MAX);
}

void iswi_remote_note_read(struct iswi_remote *r, uint64_t submitted_ns, uint64_t now_ns)
{
	uint64_t took_ns = ISWI_MAX(now_ns - submitted_ns, 1);
	uint64_t tail = iswi_counted(&r->read_tail_ns);

	if (!tail) {
		tail = ISWI_MIN(took_ns, TAIL_NS_FIRST);
	} else if (took_ns <= tail) {
		tail = ISWI_MAX(took_ns, tail - tail / TAIL_LOWER);
	} else if (submitted_ns >= iswi_counted(&r->tail_raised_ns)) {
		tail = ISWI_MIN(took_ns, tail + tail / TAIL_RAISE + 1);
		atomic_store_explicit(&r->tail_raised_ns, now_ns, memory_order_relaxed);
	}
	atomic_store_explicit(&r->read_tail_ns, tail, memory_order_relaxed);
}

uint64_t iswi_remote_note_slow(struct isw_engine *e, struct iswi_op *op)
{
	struct iswi_remote *r = iswi_remote_of(e, op->slab, op->place);
	uint64_t for_ns = e->clock->now_ns(e->clock->ctx) - op->xfer.submitted_ns;

	iswi_speed_unanswered(&r->speed, op->load, for_ns);
	if (!op->owed)
		atomic_fetch_add_explicit(&r->owed, 1, memory_order_relaxed);
	op->owed = true;
	return for_ns;
}

/*
 * The reads it owes tell whether it is back: their answers come before any other's, or their
 * deadline passes and it is down.
 */
bool iswi_remote_avoid(const struct iswi_remote *r)
{
	return atomic_load_explicit(&r->owed, memory_order_relaxed) >= ISWI_OWED_MAX;
}

/*
 * Which of the remote's connections the op goes over. Blocks of far memory are large: a read that
 * went behind a write of one would wait until the donor had all of that, so they keep apart.
 */
static uint32_t queue_of(const struct isw_engine *e, const struct iswi_op *op, uint32_t count)
{
	uint32_t stripe = (uint32_t)(op->page / ISWI_STRIPE_PAGES), half = count / 2;

	if (half == 0 || op->page < iswi_far_page(e))
		return stripe % count;
	return op->xfer.kind == ISWI_XFER_READ ? stripe % half : half + stripe % (count - half);
}

/* The op's connection, and where its pages lie there. Once for each op: it is on its way now. */
static struct iswi_queue *address(struct isw_engine *e, struct iswi_op *op)
{
	const struct iswi_place *p = iswi_place(e, op->slab, op->place);
	struct iswi_remote *r = iswi_remote_of(e, op->slab, op->place);
	uint32_t count = atomic_load_explicit(&r->queues_count, memory_order_relaxed);

	op->remote = (uint32_t)(r - e->remotes);
	if (op->xfer.kind == ISWI_XFER_READ)
		op->load = iswi_speed_begin(&r->speed, op->pages);
	op->xfer.length = op->pages * ISW_PAGE_BYTES;
	op->xfer.offset =
		atomic_load_explicit(&p->slot, memory_order_relaxed) * e->config.slab_bytes +
		op->page % e->slab_pages * ISW_PAGE_BYTES;
	return r->queues[queue_of(e, op, count)];
}

static struct iswi_op *next_op(const struct iswi_op *op)
{
	return op->xfer.next ? ISWI_CONTAINER(op->xfer.next, struct iswi_op, xfer) : NULL;
}

void iswi_remote_submit(struct isw_engine *e, struct iswi_op *first)
{
	struct iswi_queue *queue = address(e, first);

	/* Consecutive ops of one queue go as one batch. */
	while (first) {
		struct iswi_op *last = first, *next;
		struct iswi_queue *next_queue = NULL;

		while ((next = next_op(last)) && (next_queue = address(e, next)) == queue)
			last = next;
		last->xfer.next = NULL;
		queue->ops->submit(queue, &first->xfer);
		first = next;
		queue = next_queue;
	}
}

void iswi_remote_send(struct isw_engine *e, struct iswi_op *first, struct iswi_op *last,
		      struct iswi_plug *plug)
{
	if (!plug) {
		iswi_remote_submit(e, first);
		return;
	}
	if (plug->last)
		plug->last->xfer.next = &first->xfer;
	else
		plug->first = first;
	plug->last = last;
	plug->count++;
}

/* A donor has answered well. */
static void note_answer(struct isw_engine *e, struct iswi_remote *r, const struct iswi_op *op)
{
	uint64_t now_ns = e->clock->now_ns(e->clock->ctx);
	uint64_t took_ns = now_ns - op->xfer.submitted_ns;
	uint32_t transport = atomic_load_explicit(&r->transport, memory_order_relaxed);

	if (op->xfer.kind == ISWI_XFER_READ) {
		iswi_remote_note_read(r, op->xfer.submitted_ns, now_ns);
		iswi_speed_took(&r->speed, op->load, took_ns);
		iswi_count(&r->read_pages[transport], op->pages);
		iswi_latency_add(&e->remote_read_latency, took_ns);
	} else {
		iswi_count(&r->write_pages[transport], op->pages);
		iswi_latency_add(&e->remote_write_latency, took_ns);
	}
}

void iswi_remote_ended(struct isw_engine *e, const struct iswi_op *op, int error)
{
	struct iswi_place *p = iswi_place(e, op->slab, op->place);
	struct iswi_remote *r = iswi_remote_of(e, op->slab, op->place);

	if (op->owed)
		atomic_fetch_sub_explicit(&r->owed, 1, memory_order_relaxed);
	if (op->xfer.kind == ISWI_XFER_READ)
		iswi_speed_end(&r->speed, op->pages);
	if (op->measured_ns)
		iswi_speed_measured(&r->speed, op->measured_ns, e->clock->now_ns(e->clock->ctx));
	if (!error) {
		note_answer(e, r, op);
	} else {
		iswi_count(&e->count.remote_errors, 1);
		iswi_count(&r->errors, 1);
		/* The donor refuses this slab; a broken connection is reported once, by fence. */
		if (atomic_load(&r->state) == ISWI_REMOTE_UP &&
		    !atomic_exchange_explicit(&p->reported, 1, memory_order_relaxed))
			iswi_events_put(&e->events,
					&(struct isw_event){
						.kind = ISW_EVENT_SLAB_ERROR,
						.code = error,
						.slab = op->slab,
						.remote = (uint32_t)(r - e->remotes),
						.generation = iswi_kept64(&p->generation),
					});
	}
	iswi_place_put(e, op->slab, op->place);
}
