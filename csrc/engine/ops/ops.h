/* SPDX-License-Identifier: Apache-2.0 */
/* The operations on pages (read, write, zero, copy to donors) and their parts. */
#ifndef ISWI_OPS_OPS_H
#define ISWI_OPS_OPS_H

#include "engine/backup/backup.h"
#include "engine/remote/remote.h"
#include "engine/state/finish.h"
#include "engine/state/memory.h"

/* read.c, write.c, trim.c */
/* plug: of the thread that submits the request, NULL when there is none or it goes on later. */
void iswi_read(struct isw_engine *e, struct iswi_req *req, struct iswi_plug *plug);
void iswi_write(struct isw_engine *e, struct iswi_req *req, struct iswi_plug *plug);
/*
 * A remote write of one staged page, by a holder of that use; it may be grown by the pages that
 * follow in the device and in staging. For each, remote_busy is set and the buffer held.
 */
struct iswi_op *iswi_write_op(struct isw_engine *e, uint64_t page, uint32_t slot,
			      const struct iswi_use *use);
/*
 * The slab has a place again: sends it what a predecessor left staged and no backup takes.
 */
void iswi_write_stranded(struct isw_engine *e, uint32_t slab);
/* Goes on with waiting writes: staging buffers became free, or the backup began to fail. */
void iswi_write_kick(struct isw_engine *e);
void iswi_zero(struct isw_engine *e, struct iswi_req *req);
void iswi_confirm(struct isw_engine *e, struct iswi_req *req);

/* Asked of a request in flight. */
static inline bool iswi_has_others(const struct isw_engine *e)
{
	return atomic_load_explicit(&e->count.in_flight, memory_order_relaxed) > 1;
}

/* Where a read of pages that both have goes: to this donor or to the backup. now_ns: about now. */
static inline enum iswi_speed_choice iswi_quicker(const struct isw_engine *e,
						  const struct iswi_remote *r, uint32_t pages,
						  uint64_t now_ns)
{
	if (!(e->config.flags & ISW_ENGINE_QUICKER) || iswi_backup_avoid(e->backup) ||
	    (iswi_has_others(e) && iswi_pace_is_donors(&e->pace)))
		return ISWI_SPEED_DONOR;
	return iswi_speed_choose(&r->speed, &e->backup->speed, pages, now_ns);
}

/*
 * What op->done needs to read its pages again. Not a copy: a transport may still link the transfer,
 * and another leg's end may still come.
 */
static inline struct iswi_op iswi_op_rest(const struct iswi_op *op)
{
	return (struct iswi_op){
		.engine = op->engine,
		.req = op->req,
		.page = op->page,
		.pages = op->pages,
		.slab = op->slab,
		.place = op->place,
		.done = op->done,
	};
}

/* hedge.c */
/*
 * A read of a donor is slow: its pages are asked of the backup as well, if that has them all;
 * otherwise false. On the transfer's receiver thread, as xfer.slow. When both legs have failed, or
 * a donor whose answer was dropped is back, op->done is called, on a copy of the donor's leg whose
 * `tried` says why; the request's pending is put after it.
 */
bool iswi_hedge_begin(struct iswi_op *op, uint32_t received);
/*
 * The other way round, for pages that the backup is thought to have sooner, PAIR_PAGES at most: op
 * is the donor's leg, which is sent only when the backup is slow. False: there are no buffers, and
 * op is as it was. measured_ns: as in op, of the backup's leg.
 */
bool iswi_hedge_backup_first(struct iswi_op *op, uint64_t measured_ns);
/* A leg has ended; of the donor's the use of the slab was given back. */
void iswi_hedge_ended(struct iswi_op *op, bool remote, int error);

/* ahead.c */
/*
 * A request has read [page, end): reads ahead, if the reads of late have a trend. in_vain is called
 * on a copy of that op for pages of a request that joined and did not get them, with `tried` and
 * one of the request's pending held.
 */
void iswi_ahead_note(struct isw_engine *e, uint64_t page, uint64_t end, struct iswi_plug *plug,
		     void (*in_vain)(struct iswi_op *op, int error));
/* So many pages that were read ahead are in requests now. */
void iswi_ahead_used(struct isw_engine *e, uint32_t pages);

/* copy.c */
/* Pages of a copy at once: what a fault's read may find before it on a connection. */
#define ISWI_COPY_PAGES_MAX 256u
static inline void iswi_copy_count(struct isw_engine *e, bool pull, bool arrived)
{
	if (!arrived)
		iswi_count(&e->count.pages_copy_dropped, 1);
	else
		iswi_count(pull ? &e->count.pages_migrated : &e->count.pages_copied, 1);
}
/* The slab has a new place: a pass that was made does not count for it. */
void iswi_pull_restart(struct isw_engine *e, uint32_t slab);

#endif
