// SPDX-License-Identifier: Apache-2.0
/* The fault layer does to a working queue what it is told, and keeps the transport's promises. */
#define _GNU_SOURCE 1
#include "tcp_fixture.h"
#include "transport/fault.h"

#define OPS 8

struct setup {
	struct server server;
	struct client client;
	struct iswi_fault *fault;
	struct op op[OPS];
	char page[OPS][ISW_PAGE_BYTES];
	char memory[EXPORT_BYTES];
};

static struct setup setup;

/* All transfers are of one kind; the donor's pages hold their number + 1. */
static void start(enum iswi_xfer_kind kind)
{
	struct iswi_queue_events events = {.down = client_down, .ctx = &setup.client};
	struct iswi_queue_events below_events;
	struct iswi_tcp_config config;
	struct iswi_queue *below;

	for (uint32_t i = 0; i < OPS; i++)
		memset(setup.memory + i * ISW_PAGE_BYTES, (int)i + 1, ISW_PAGE_BYTES);
	server_start(&setup.server, server_memory, setup.memory);
	config = client_config(setup.server.port);
	client_init(&setup.client);
	CHECK_EQ(iswi_fault_create(&events, &setup.fault, &below_events), 0);
	CHECK_EQ(iswi_tcp_connect(&config, &below_events, &below, NULL), 0);
	setup.client.queue = iswi_fault_attach(setup.fault, below);
	for (uint32_t i = 0; i < OPS; i++) {
		memset(setup.page[i], 'p', ISW_PAGE_BYTES);
		op_init(&setup.op[i], &setup.client, kind, i * ISW_PAGE_BYTES, setup.page[i],
			ISW_PAGE_BYTES);
	}
}

static void add(struct iswi_fault_rule rule)
{
	CHECK_EQ(iswi_fault_add(setup.fault, &rule), 0);
}

static void end(void)
{
	client_destroy(&setup.client);
	server_join(&setup.server);
	for (uint32_t i = 0; i < OPS; i++)
		CHECK_EQ(setup.op[i].ended, 1);
}

static void check_rules(void)
{
	struct iswi_fault_rule rule = {.action = ISWI_FAULT_FAIL, .error = -EIO};

	start(ISWI_XFER_READ);
	CHECK_EQ(iswi_fault_add(setup.fault, &rule), -EINVAL);
	rule.kinds = ISWI_FAULT_READS;
	rule.error = 0;
	CHECK_EQ(iswi_fault_add(setup.fault, &rule), -EINVAL);
	rule.error = -EIO;
	for (uint32_t i = 0; i < ISWI_FAULT_RULES_MAX; i++)
		add(rule);
	CHECK_EQ(iswi_fault_add(setup.fault, &rule), -ENOSPC);
	iswi_fault_clear(setup.fault);
	ops_submit(setup.op, OPS);
	client_wait_ended(&setup.client, OPS);
	for (uint32_t i = 0; i < OPS; i++) {
		CHECK_EQ(setup.op[i].error, 0);
		CHECK_EQ(setup.page[i][0], i + 1);
	}
	end();
}

static void check_fail(void)
{
	start(ISWI_XFER_WRITE);
	add((struct iswi_fault_rule){ISWI_FAULT_FAIL, ISWI_FAULT_READS, .error = -EPERM});
	add((struct iswi_fault_rule){ISWI_FAULT_FAIL, ISWI_FAULT_WRITES, 2, 3, .error = -ENOSPC});
	ops_submit(setup.op, OPS);
	client_wait_ended(&setup.client, OPS);
	for (uint32_t i = 0; i < OPS; i++) {
		bool hit = i >= 2 && i < 5;

		CHECK_EQ(setup.op[i].error, hit ? -ENOSPC : 0);
		CHECK_EQ(setup.memory[i * ISW_PAGE_BYTES], hit ? (int)i + 1 : 'p');
	}
	CHECK_EQ(setup.client.downs, 0);
	end();
}

static void check_corrupt(void)
{
	start(ISWI_XFER_READ);
	add((struct iswi_fault_rule){ISWI_FAULT_CORRUPT, ISWI_FAULT_READS, 1, 1, .corrupt_at = 100,
				     .corrupt_bytes = 2});
	add((struct iswi_fault_rule){ISWI_FAULT_CORRUPT, ISWI_FAULT_READS, 2, 1,
				     .corrupt_at = 2048});
	ops_submit(setup.op, OPS);
	client_wait_ended(&setup.client, OPS);
	for (uint32_t i = 0; i < OPS; i++) {
		CHECK_EQ(setup.op[i].error, 0);
		for (uint32_t at = 0; at < ISW_PAGE_BYTES; at++) {
			bool hit = (i == 1 && at >= 100 && at < 102) || (i == 2 && at >= 2048);
			uint8_t want = (uint8_t)(i + 1);

			CHECK_EQ((uint8_t)setup.page[i][at], hit ? (uint8_t)~want : want);
		}
	}
	end();
}

static void check_delay(void)
{
	start(ISWI_XFER_READ);
	add((struct iswi_fault_rule){ISWI_FAULT_DELAY, ISWI_FAULT_READS, .count = 1,
				     .delay_ms = 150});
	ops_submit(setup.op, OPS);
	client_wait_ended(&setup.client, OPS - 1);
	/* The others overtook it; that it comes at all is what the next wait shows. */
	client_wait_ended(&setup.client, OPS);
	CHECK_EQ(setup.op[0].error, 0);
	CHECK_EQ(setup.page[0][0], 1);
	end();
}

/* Dropped ones end with the queue only, those below answered before. */
static void check_drop(enum iswi_fault_action action)
{
	bool sent = action == ISWI_FAULT_DROP_REPLY;

	start(ISWI_XFER_WRITE);
	add((struct iswi_fault_rule){action, ISWI_FAULT_WRITES, .skip = 3, .count = 2});
	ops_submit(setup.op, OPS);
	client_wait_ended(&setup.client, OPS - 2);
	while (iswi_fault_held(setup.fault) < 2)
		usleep(1000);
	CHECK_EQ(setup.op[3].ended, 0);
	CHECK_EQ(setup.op[4].ended, 0);
	client_shutdown(&setup.client);
	CHECK_EQ(client_wait_down(&setup.client), -ESHUTDOWN);
	client_wait_ended(&setup.client, OPS);
	CHECK_EQ(setup.op[3].error, -ESHUTDOWN);
	CHECK_EQ(setup.op[4].error, -ESHUTDOWN);
	end();
	CHECK_EQ(setup.memory[3 * ISW_PAGE_BYTES], sent ? 'p' : 4);
	CHECK_EQ(setup.memory[5 * ISW_PAGE_BYTES], 'p');
}

/* What was dropped without a shutdown is ended by destroy. */
static void check_drop_then_destroy(void)
{
	start(ISWI_XFER_READ);
	add((struct iswi_fault_rule){ISWI_FAULT_DROP, ISWI_FAULT_READS, .count = OPS / 2});
	add((struct iswi_fault_rule){ISWI_FAULT_DELAY, ISWI_FAULT_READS, .delay_ms = 3600000});
	ops_submit(setup.op, OPS);
	CHECK_EQ(setup.client.ended, 0);
	end();
	for (uint32_t i = 0; i < OPS; i++)
		CHECK_EQ(setup.op[i].error, -ESHUTDOWN);
}

/* The sixth transfer takes the queue down: it and the later ones never happen. */
static void check_down(void)
{
	struct op late;

	start(ISWI_XFER_WRITE);
	add((struct iswi_fault_rule){ISWI_FAULT_DELAY, ISWI_FAULT_WRITES, .count = 1,
				     .delay_ms = 3600000});
	add((struct iswi_fault_rule){ISWI_FAULT_DOWN, ISWI_FAULT_WRITES, .skip = 5, .count = 1,
				     .error = -ETIMEDOUT});
	for (uint32_t i = 0; i < OPS; i++) {
		op_submit(&setup.op[i]);
		if (i == 4) /* so that these are certain to have been answered */
			client_wait_ended(&setup.client, 4);
	}
	CHECK_EQ(client_wait_down(&setup.client), -ETIMEDOUT);
	client_wait_ended(&setup.client, OPS);
	CHECK_EQ(setup.op[0].error, -ETIMEDOUT);
	for (uint32_t i = 1; i < 5; i++)
		CHECK_EQ(setup.op[i].error, 0);
	CHECK_EQ(setup.op[5].error, -ETIMEDOUT);
	CHECK(setup.op[6].error < 0);
	CHECK(setup.op[7].error < 0);
	op_init(&late, &setup.client, ISWI_XFER_WRITE, 0, setup.page[0], ISW_PAGE_BYTES);
	CHECK(op_run(&late) < 0);
	end();
	CHECK_EQ(setup.memory[5 * ISW_PAGE_BYTES], 6);
}

int main(void)
{
	check_rules();
	check_fail();
	check_corrupt();
	check_delay();
	check_drop(ISWI_FAULT_DROP);
	check_drop(ISWI_FAULT_DROP_REPLY);
	check_drop_then_destroy();
	check_down();
	return 0;
}
