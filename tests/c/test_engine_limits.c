/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a request or a configuration may not be, and that answers come exactly once. So does the
 * report of a use.
 */
#include "engine_fixture.h"

struct asked {
	struct iswi_req req;
	int answers, error;
};

static void answered(struct iswi_req *req, int error)
{
	struct asked *asked = ISWI_CONTAINER(req, struct asked, req);

	asked->answers++;
	asked->error = error;
}

static int ask(struct world *w, enum iswi_req_op op, uint64_t offset, uint64_t length, void *data)
{
	struct asked asked = {
		.req = {.op = op, .offset = offset, .length = length, .data = data},
	};

	asked.req.done = answered;
	iswi_engine_submit(w->e, &asked.req);
	CHECK_EQ(asked.answers, 1); /* wrong ones are answered at once */
	return asked.error;
}

WORLD_TEST(unaligned_requests_are_refused, world_new(0))
{
	static _Alignas(ISW_PAGE_BYTES) unsigned char data[3 * ISW_PAGE_BYTES];

	for (enum iswi_req_op op = ISWI_READ; op <= ISWI_ZERO; op++) {
		CHECK_EQ(ask(w, op, 512, ISW_PAGE_BYTES, data), -EINVAL);
		CHECK_EQ(ask(w, op, 0, ISW_PAGE_BYTES - 1, data), -EINVAL);
		CHECK_EQ(ask(w, op, ISW_PAGE_BYTES, ISW_PAGE_BYTES + 512, data), -EINVAL);
	}
	CHECK_EQ(ask(w, ISWI_READ, 0, ISW_PAGE_BYTES, data + 512), -EINVAL);
	CHECK_EQ(stats_of(w).requests_failed, 13);
	CHECK_EQ(stats_of(w).staging_pages_used, 0);
}

WORLD_TEST(requests_past_the_end_are_refused, world_new(0))
{
	static _Alignas(ISW_PAGE_BYTES) unsigned char data[2 * ISW_PAGE_BYTES];
	uint64_t end = PAGES * ISW_PAGE_BYTES, page = ISW_PAGE_BYTES;

	for (enum iswi_req_op op = ISWI_READ; op <= ISWI_ZERO; op++) {
		CHECK_EQ(ask(w, op, end, page, data), -ENOSPC);
		CHECK_EQ(ask(w, op, end - page, 2 * page, data), -ENOSPC);
		CHECK_EQ(ask(w, op, UINT64_MAX - page + 1, page, data), -ENOSPC);
		CHECK_EQ(ask(w, op, page, UINT64_MAX - page + 1, data), -ENOSPC);
	}
	CHECK_EQ(ask(w, ISWI_TRIM, 0, end, NULL), 0);
	CHECK_EQ(ask(w, ISWI_READ, end - page, page, data), 0);
}

WORLD_TEST(the_next_page_is_reported_once, world_new(0))
{
	put(w, 1, 1, 100);
	CHECK_EQ(w->events[ISW_EVENT_USED], 0); /* nobody has asked */
	for (uint32_t times = 1; times <= 4; times++) {
		isw_engine_report_use(w->e);
		isw_engine_report_use(w->e);
		trim(w, 8, 1);
		flush(w);
		CHECK_EQ(w->events[ISW_EVENT_USED], times - 1); /* these move no page */
		if (times % 2)
			put(w, 2, 1, 200);
		else
			get(w, 2, 1);
		CHECK_EQ(w->events[ISW_EVENT_USED], times);
		put(w, 3, 1, 300);
		get(w, 3, 1);
		CHECK_EQ(w->events[ISW_EVENT_USED], times);
	}
}

WORLD_TEST(requests_larger_than_agreed_are_refused, world_new(0))
{
	static _Alignas(
		ISW_PAGE_BYTES) unsigned char data[(REQUEST_PAGES_MAX + 1) * ISW_PAGE_BYTES];

	CHECK_EQ(ask(w, ISWI_READ, 0, sizeof(data), data), -EINVAL);
	CHECK_EQ(ask(w, ISWI_WRITE, 0, sizeof(data), data), -EINVAL);
	CHECK_EQ(ask(w, ISWI_TRIM, 0, sizeof(data), NULL), 0);
	CHECK_EQ(ask(w, ISWI_ZERO, 0, sizeof(data), NULL), 0);
}

WORLD_TEST(empty_requests_are_done, world_new(0))
{
	for (enum iswi_req_op op = ISWI_READ; op <= ISWI_ZERO; op++) {
		CHECK_EQ(ask(w, op, ISW_PAGE_BYTES, 0, NULL), 0);
		CHECK_EQ(ask(w, op, PAGES * ISW_PAGE_BYTES, 0, NULL), 0);
	}
}

WORLD_TEST(one_request_too_many_is_refused, WORLD_BUT(config.requests_max = 4))
{
	uint32_t ids[4];

	for (uint32_t i = 0; i < 4; i++)
		ids[i] = put(w, i, 1, 100 + i);
	CHECK_EQ(stats_of(w).requests_in_flight, 4);
	CHECK_EQ(w->error[put(w, 9, 1, 900)], -EBUSY);
	CHECK_EQ(w->error[get(w, 9, 1)], -EBUSY);
	CHECK_EQ(w->error[flush(w)], -EBUSY);
	CHECK_EQ(stats_of(w).requests_in_flight, 4); /* those refused do not count */
	settle(w);
	for (uint32_t i = 0; i < 4; i++)
		CHECK_EQ(w->error[ids[i]], 0);
	CHECK_EQ(read_settled(w, 9), 0);
	write_settled(w, 9, 1, 901);
}

WORLD_TEST(a_write_larger_than_all_buffers_is_done_in_pieces,
	   WORLD_BUT(config.request_bytes_max = PAGES * ISW_PAGE_BYTES))
{
	static unsigned char data[PAGES * ISW_PAGE_BYTES];
	struct asked asked = {
		.req = {.op = ISWI_WRITE, .length = sizeof(data), .data = data},
	};

	for (uint32_t page = 0; page < PAGES; page++)
		for (uint32_t i = 0; i < ISW_PAGE_BYTES / 8; i++)
			((uint64_t *)(data + page * ISW_PAGE_BYTES))[i] = 100 + page;
	asked.req.done = answered;
	iswi_engine_submit(w->e, &asked.req);
	CHECK_EQ(asked.answers, 0);
	CHECK_EQ(stats_of(w).staging_pages_used, STAGING);
	CHECK_EQ(stats_of(w).staging_waits, 1);
	settle(w);
	CHECK_EQ(asked.answers, 1);
	CHECK_EQ(asked.error, 0);
	for (uint32_t page = 0; page < PAGES; page++)
		CHECK_EQ(read_settled(w, page), 100 + page);
}

/* A front end that asks for the next page as soon as it has one. */
struct chain {
	struct iswi_req req;
	struct world *w;
	uint32_t left;
};

static void ask_again(struct iswi_req *req, int error)
{
	struct chain *chain = ISWI_CONTAINER(req, struct chain, req);

	CHECK_EQ(error, 0);
	if (--chain->left) {
		req->offset = (req->offset + ISW_PAGE_BYTES) % (PAGES * ISW_PAGE_BYTES);
		iswi_engine_submit(chain->w->e, req);
	}
}

/* Its end frees a buffer; before the one who waits for it gets it, this asks for one, too. */
struct pusher {
	struct iswi_req req, next;
	struct world *w;
};

static void ignored(struct iswi_req *req, int error)
{
	(void)req;
	CHECK_EQ(error, 0);
}

static void push_in(struct iswi_req *req, int error)
{
	struct pusher *pusher = ISWI_CONTAINER(req, struct pusher, req);

	CHECK_EQ(error, 0);
	iswi_engine_submit(pusher->w->e, &pusher->next);
}

WORLD_TEST(a_later_write_does_not_overtake_a_waiting_one, world_new(0))
{
	static unsigned char zeros[ISW_PAGE_BYTES];
	struct pusher pusher = {.w = w};
	uint32_t id;

	pusher.req = (struct iswi_req){
		.op = ISWI_WRITE, .length = ISW_PAGE_BYTES, .data = zeros, .done = push_in};
	pusher.next = pusher.req;
	pusher.next.offset = 16 * ISW_PAGE_BYTES;
	pusher.next.done = ignored;
	iswi_engine_submit(w->e, &pusher.req);
	put(w, 1, 8, 100);
	put(w, 9, 7, 200);
	id = put(w, 16, 1, 300); /* waits */
	DISK_WRITE(w);
	END_WELL(w, id);
	CHECK_EQ(read_settled(w, 16), 0); /* the pusher's, which came last */
}

WORLD_TEST(done_may_submit_again, world_mapped(0))
{
	static const enum iswi_req_op ops[] = {ISWI_WRITE, ISWI_READ, ISWI_FLUSH, ISWI_TRIM};
	static _Alignas(ISW_PAGE_BYTES) unsigned char data[ISW_PAGE_BYTES];

	for (uint32_t i = 0; i < 4; i++) {
		struct chain chains[20];

		/* More than there are buffers, so that writes go on from inside of others' ends. */
		for (uint32_t k = 0; k < 20; k++) {
			chains[k] = (struct chain){.w = w, .left = 10};
			chains[k].req.op = ops[i];
			chains[k].req.length = ops[i] == ISWI_FLUSH ? 0 : ISW_PAGE_BYTES;
			chains[k].req.offset = (k + i) % PAGES * ISW_PAGE_BYTES;
			chains[k].req.data = data;
			chains[k].req.done = ask_again;
			iswi_engine_submit(w->e, &chains[k].req);
		}
		settle(w);
		for (uint32_t k = 0; k < 20; k++)
			CHECK_EQ(chains[k].left, 0);
	}
}

TEST(impossible_configurations_are_refused)
{
	static const struct {
		uint64_t size_bytes, slab_bytes;
		uint32_t staging, request, requests, remotes, write;
	} wrong[] = {
		{0, 4096, 16, 4096, 1, 1, 4096},          {4097, 4096, 16, 4096, 1, 1, 4096},
		{8192, 0, 16, 4096, 1, 1, 4096},          {8192, 4095, 16, 4096, 1, 1, 4096},
		{1ull << 40, 4096, 16, 4096, 1, 1, 4096}, {8192, 4096, 15, 4096, 1, 1, 4096},
		{8192, 4096, 16, 0, 1, 1, 4096},          {8192, 4096, 16, 5000, 1, 1, 4096},
		{8192, 4096, 16, 64u << 20, 1, 1, 4096},  {8192, 4096, 16, 4096, 0, 1, 4096},
		{8192, 4096, 16, 4096, 1, 0, 4096},       {8192, 4096, 16, 4096, 1, 1, 4095},
	};

	for (uint32_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
		struct isw_engine_config config = {
			.size_bytes = wrong[i].size_bytes,
			.slab_bytes = wrong[i].slab_bytes,
			.staging_pages = wrong[i].staging,
			.request_bytes_max = wrong[i].request,
			.requests_max = wrong[i].requests,
			.remotes_max = wrong[i].remotes,
			.state_fd = -1,
			.backup_write_bytes_max = wrong[i].write,
		};
		struct isw_error error = {0};
		isw_engine *e = NULL;

		CHECK_EQ(isw_sim_create(&config, &e, &error), -EINVAL);
		CHECK_EQ(error.code, -EINVAL);
		CHECK(error.text[0]);
		CHECK(!e);
	}
	isw_engine_destroy(NULL);
}
