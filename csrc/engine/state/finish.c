/* SPDX-License-Identifier: Apache-2.0 */
/* A request's way out of the engine. */
#include <errno.h>

#include "engine/state/finish.h"

static void finish(struct isw_engine *e, struct iswi_req *req)
{
	uint64_t took_ns = e->clock->now_ns(e->clock->ctx) - req->start_ns;
	int error = atomic_load_explicit(&req->error, memory_order_relaxed);

	if (req->op == ISWI_READ) {
		iswi_latency_add(&e->read_latency, took_ns);
		if (atomic_load_explicit(&req->waited, memory_order_relaxed))
			iswi_latency_add(&e->waited_read_latency, took_ns);
	} else if (req->op == ISWI_WRITE) {
		iswi_latency_add(&e->write_latency, took_ns);
	}
	if (error)
		iswi_count(&e->count.requests_failed, 1);
	if (!(req->flags & ISWI_REQ_FAR))
		atomic_fetch_sub_explicit(&e->count.block_in_flight, 1, memory_order_release);
	atomic_fetch_sub_explicit(&e->count.in_flight, 1, memory_order_release);
	req->done(req, error);
}

void iswi_req_finish_list(struct isw_engine *e, struct iswi_req *list)
{
	while (list) {
		struct iswi_req *req = list;
		void (*then)(struct isw_engine *, struct iswi_req *) = req->then;

		list = req->next;
		req->next = NULL;
		req->then = NULL;
		if (then && !atomic_load_explicit(&req->error, memory_order_relaxed))
			then(e, req);
		else
			finish(e, req);
	}
}

void iswi_req_fail(struct iswi_req *req, int error)
{
	/* Relaxed: ordered by the acq_rel decrement of pending that follows. */
	atomic_store_explicit(&req->error, error, memory_order_relaxed);
}

void iswi_req_put(struct isw_engine *e, struct iswi_req *req)
{
	if (atomic_fetch_sub_explicit(&req->pending, 1, memory_order_acq_rel) == 1) {
		req->next = NULL;
		iswi_req_finish_list(e, req);
	}
}

void iswi_req_fail_list(struct isw_engine *e, struct iswi_req *list)
{
	for (struct iswi_req *req = list; req; req = req->next)
		iswi_req_fail(req, -EIO);
	iswi_req_finish_list(e, list);
}
