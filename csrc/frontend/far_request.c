/* SPDX-License-Identifier: Apache-2.0 */
/* Requests out of a ring into the engine, and their answers. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "frontend/far_client.h"

void iswi_far_tell(int eventfd)
{
	const uint64_t one = 1;

	/* It fails only when it is readable anyway. */
	(void)!write(eventfd, &one, sizeof(one));
}

void iswi_far_hear(int eventfd)
{
	uint64_t count;

	(void)!read(eventfd, &count, sizeof(count));
}

static char *bounce_take(struct far *far)
{
	char *bounce = NULL;

	pthread_mutex_lock(&far->bounce_lock);
	if (far->bounces_free > 0)
		bounce = far->bounce_free[--far->bounces_free];
	else
		far->bounce_wanted = true;
	pthread_mutex_unlock(&far->bounce_lock);
	return bounce;
}

static void bounce_give(struct far *far, char *bounce)
{
	bool wanted;

	pthread_mutex_lock(&far->bounce_lock);
	far->bounce_free[far->bounces_free++] = bounce;
	wanted = far->bounce_wanted;
	far->bounce_wanted = false;
	pthread_mutex_unlock(&far->bounce_lock);
	if (wanted)
		iswi_far_tell(far->look_told[ISWF_KIND_READ]);
}

static bool is_asked(const struct iswf_slot *slot)
{
	return atomic_load(&slot->state) == ISWF_ASKED;
}

static void enter(struct far_client *client)
{
	pthread_mutex_lock(&client->leave_lock);
	client->in_flight++;
	pthread_mutex_unlock(&client->leave_lock);
}

static void leave(struct far_client *client)
{
	pthread_mutex_lock(&client->leave_lock);
	if (--client->in_flight == 0 && client->ending)
		iswi_far_tell(client->far->control_told);
	pthread_mutex_unlock(&client->leave_lock);
}

/*
 * Answered before the request is given up: else who looks meanwhile would take it once more. What
 * the client asks next in this slot may have been passed over until then, so it is looked at again.
 */
static void answer(struct far_request *request, int result)
{
	struct far_client *client = request->client;
	struct iswf_slot *slot = &client->ring->slots[request->slot];

	slot->result = result;
	atomic_store(&slot->state, ISWF_ANSWERED);
	syscall(SYS_futex, &slot->state, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
	atomic_store(&request->taken, false);
	if (is_asked(slot))
		iswi_far_tell(client->far->look_told[iswf_kind_of(request->slot)]);
	leave(client);
}

static void leave_place(struct far_request *request, int error)
{
	struct iswi_far_table *table = &request->client->far->table;

	if (request->whole)
		iswi_far_place_left(table, request->place, error == 0);
	else
		iswi_far_place_put(table, request->place);
}

/* Any thread of the engine's. */
static void request_done(struct iswi_req *req, int error)
{
	struct far_request *request = ISWI_CONTAINER(req, struct far_request, req);
	struct far_client *client = request->client;

	leave_place(request, error);
	if (request->bounce != NULL)
		bounce_give(client->far, request->bounce);
	/* Which of several pages are lost only reads of one page can tell. */
	if (error == -ENODATA && request->bytes > ISWF_PAGE_BYTES)
		error = -EIO;
	answer(request, error);
}

/* What the slot asks for, read once; 0 or why it is refused. */
static int read_request(struct far_request *request, const struct iswf_slot *slot,
			uint32_t *block_out, uint32_t *first_out)
{
	const volatile struct iswf_slot *once = slot;
	uint32_t op = once->op, block = once->block, first = once->first, pages = once->pages;
	bool writes = op == ISWF_WRITE;

	request->op = op;
	if (op > ISWF_CONFIRM || writes != (iswf_kind_of(request->slot) == ISWF_KIND_WRITE))
		return -EINVAL;
	if (pages == 0 || pages > ISWF_BLOCK_PAGES || first > ISWF_BLOCK_PAGES - pages)
		return -EINVAL;
	request->bytes = pages * ISWF_PAGE_BYTES;
	request->whole = op == ISWF_DISCARD && pages == ISWF_BLOCK_PAGES;
	*block_out = block;
	*first_out = first;
	return 0;
}

static void submit(struct far_request *request, uint32_t first)
{
	static const enum iswi_req_op ops[] = {
		[ISWF_READ] = ISWI_READ,
		[ISWF_WRITE] = ISWI_WRITE,
		[ISWF_DISCARD] = ISWI_TRIM,
		[ISWF_CONFIRM] = ISWI_CONFIRM,
	};
	struct far *far = request->client->far;

	request->req = (struct iswi_req){
		.op = ops[request->op],
		.flags = ISWI_REQ_FAR,
		.offset = far->offset + (uint64_t)request->place * ISWF_BLOCK_BYTES +
			  (uint64_t)first * ISWF_PAGE_BYTES,
		.length = request->bytes,
		.data = request->op == ISWF_READ ? request->bounce
						 : iswf_bytes(request->client->ring, request->slot),
		.opened = iswf_bytes(request->client->ring, request->slot),
		.done = request_done,
	};
	iswi_engine_submit(far->engine, &request->req);
}

/* Takes what the slot asks for; false: it has to wait for a bounce buffer. */
static bool take(struct far_request *request)
{
	struct far_client *client = request->client;
	struct far *far = client->far;
	uint32_t block, first;
	int code;

	request->bounce = NULL;
	code = read_request(request, &client->ring->slots[request->slot], &block, &first);
	if (code == 0 && request->op == ISWF_READ) {
		request->bounce = bounce_take(far);
		if (request->bounce == NULL)
			return false;
	}
	if (code == 0)
		code = iswi_far_place_get(&far->table, client->index, block,
					  request->op == ISWF_WRITE, &request->place);
	if (code == 0 && request->whole) {
		code = iswi_far_place_close(&far->table, request->place);
		if (code != 0)
			iswi_far_place_put(&far->table, request->place);
	}
	if (code == 0) {
		submit(request, first);
		return true;
	}
	if (request->bounce != NULL)
		bounce_give(far, request->bounce);
	answer(request, code);
	return true;
}

void iswi_far_look(struct far_client *client, uint32_t kind)
{
	uint32_t from = iswf_first_slot(kind), end = from + iswf_slots(kind);

	pthread_mutex_lock(&client->look_lock[kind]);
	for (uint32_t i = from; client->live && i < end; i++) {
		struct far_request *request = &client->requests[i];
		struct iswf_slot *slot = &client->ring->slots[i];

		if (!is_asked(slot) || atomic_exchange(&request->taken, true))
			continue;
		/* Again: the request that was seen above may have been answered in between. */
		if (!is_asked(slot)) {
			atomic_store(&request->taken, false);
			continue;
		}
		enter(client);
		if (take(request))
			continue;
		atomic_store(&request->taken, false);
		leave(client);
	}
	pthread_mutex_unlock(&client->look_lock[kind]);
}

static void discard_done(struct iswi_req *req, int error)
{
	struct far_request *request = ISWI_CONTAINER(req, struct far_request, req);
	struct far_client *client = request->client;
	struct far *far = client->far;

	iswi_far_place_left(&far->table, request->place, error == 0);
	if (error == 0)
		client->discard_from = request->place + 1;
	atomic_store_explicit(&client->discarded, error, memory_order_release);
	leave(client);
}

bool iswi_far_discard_next(struct far_client *client)
{
	struct far_request *request = &client->discard;
	struct far *far = client->far;

	request->place = iswi_far_place_next(&far->table, client->index, client->discard_from);
	if (request->place == ISWI_FAR_NONE)
		return false;
	atomic_store_explicit(&client->discarded, 1, memory_order_relaxed);
	enter(client);
	request->client = client;
	request->req = (struct iswi_req){
		.op = ISWI_TRIM,
		.flags = ISWI_REQ_FAR,
		.offset = far->offset + (uint64_t)request->place * ISWF_BLOCK_BYTES,
		.length = ISWF_BLOCK_BYTES,
		.done = discard_done,
	};
	iswi_engine_submit(far->engine, &request->req);
	return true;
}
