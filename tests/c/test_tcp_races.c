// SPDX-License-Identifier: Apache-2.0
/*
 * Interleavings too rare to wait for, made by hand: the test plays a submitter that is stopped at
 * a bad moment, by setting what that thread would have set.
 */
#define _GNU_SOURCE 1
#include "tcp_fixture.h"
#include "tests_between.h"
#include "transport/tcp_internal.h"

/* How long is looked whether something happens that must not: too short only hides a fault. */
#define LOOK_US 50000

static struct server server;
static struct client client;
static char memory[EXPORT_BYTES], page[ISW_PAGE_BYTES];

static struct iswi_tcp *start(void)
{
	both_start(&server, &client, server_memory, memory, 0);
	return ISWI_CONTAINER(iswi_tq_of(client.queue), struct iswi_tcp, tq);
}

static void set_sending(struct iswi_tcp *tcp, bool sending)
{
	pthread_mutex_lock(&tcp->tq.lock);
	tcp->sending = sending;
	pthread_cond_broadcast(&tcp->tq.quiet);
	pthread_mutex_unlock(&tcp->tq.lock);
}

static void check_none_ended(void)
{
	usleep(LOOK_US);
	pthread_mutex_lock(&client.lock);
	CHECK_EQ(client.ended, 0);
	pthread_mutex_unlock(&client.lock);
}

/* A thread inside sendmsg reads a write's buffer: the queue is down, but the write is not ended. */
TEST(check_sender_inside)
{
	struct op op;
	struct iswi_tcp *tcp = start();

	set_sending(tcp, true);
	op_start(&op, &client, ISWI_XFER_WRITE, 0, page, sizeof(page));
	client_shutdown(&client);
	CHECK_EQ(client_wait_down(&client), -ESHUTDOWN);
	check_none_ended();

	/* The system call returns. */
	set_sending(tcp, false);
	ops_await(&op, 1, -ESHUTDOWN);
	both_end(&server, &client);
}

/* What others submit while one sends goes along, or is handed on: nothing is forgotten. */
TEST(check_sender_takes_along)
{
	struct op op[3];
	struct iswi_tcp *tcp = start();

	set_sending(tcp, true);
	for (uint32_t i = 0; i < 3; i++)
		op_start(&op[i], &client, ISWI_XFER_READ, 0, page, sizeof(page));
	check_none_ended();
	iswi_tcp_send(tcp, false);
	ops_await(op, 3, 0);
	both_end(&server, &client);
}

static void *destroy_main(void *opaque)
{
	(void)opaque;
	client.queue->ops->destroy(client.queue);
	pthread_mutex_lock(&client.lock);
	client.queue = NULL;
	pthread_mutex_unlock(&client.lock);
	return NULL;
}

/* A submitter whose transfers all ended is still inside submit: the queue must outlive that. */
TEST(check_destroy_waits_for_submitter)
{
	pthread_t thread;
	struct iswi_tcp *tcp = start();

	pthread_mutex_lock(&tcp->tq.lock);
	tcp->tq.users++;
	pthread_mutex_unlock(&tcp->tq.lock);
	CHECK_EQ(pthread_create(&thread, NULL, destroy_main, NULL), 0);
	CHECK_EQ(client_wait_down(&client), -ESHUTDOWN);
	usleep(LOOK_US);
	pthread_mutex_lock(&client.lock);
	CHECK(client.queue != NULL);
	pthread_mutex_unlock(&client.lock);
	pthread_mutex_lock(&tcp->tq.lock);
	tcp->tq.users--;
	pthread_cond_broadcast(&tcp->tq.quiet);
	pthread_mutex_unlock(&tcp->tq.lock);
	CHECK_EQ(pthread_join(thread, NULL), 0);
	CHECK_EQ(client.downs, 1);
	server_join(&server);
}
