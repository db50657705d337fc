// SPDX-License-Identifier: Apache-2.0
/* Every way in which connecting can fail has its own error, and none shows the export's name. */
#define _GNU_SOURCE 1
#include "tcp_fixture.h"
#include "tests_between.h"

/* Fails as expected, with a message that names the port and keeps the ticket secret. */
static void expect_error(const struct iswi_tcp_config *config, int code, const char *words)
{
	struct client client;
	struct iswi_queue_events events = {.down = client_down, .ctx = &client};
	struct isw_error error = {0};
	char port[16];

	client_init(&client);
	CHECK_EQ(iswi_tcp_connect(config, &events, &client.queue, &error), code);
	CHECK_EQ(error.code, code);
	check_says(error.text, words);
	snprintf(port, sizeof(port), "port %u", config->port);
	CHECK(config->port == 0 || strstr(error.text, port) != NULL);
	CHECK(strstr(error.text, TICKET) == NULL);
	CHECK_EQ(client.downs, 0);
}

/* What a server says, and what connecting to it ends with. */
struct answer {
	int code;
	const char *words; /* in the message */
	/* Of what follows the first that is there; before all but `bytes` there is a greeting. */
	const char *bytes;
	uint32_t count; /* of bytes */
	uint32_t type;  /* of an option's reply, without `count` of `payload` */
	const char *payload;
	uint64_t size;                        /* an export's */
	uint32_t flags, block_min, block_max; /* 0: as large as a transfer may be */
	bool shut;                            /* then says no more; else waits */
	bool go;                              /* bytes come after a greeting and a request for GO */
};

#define NO_NAME        "no " TICKET " here", .count = sizeof(TICKET) + 8
#define GRANTED(bytes) .size = (bytes), .block_min = 1, .flags = NBD_FLAG_HAS_FLAGS

static void answer(int fd, void *arg)
{
	const struct answer *a = arg;

	if (a->bytes == NULL || a->go)
		CHECK(server_greet(fd) && server_take_go(fd));
	if (a->bytes != NULL)
		say(fd, a->bytes, a->count);
	else if (a->type != 0)
		server_option_reply(fd, a->type, a->payload, a->count);
	else if (server_info_export(fd, a->size, (uint16_t)a->flags) &&
		 server_info_blocks(fd, a->block_min, a->block_max ? a->block_max : 1u << 20))
		server_option_reply(fd, NBD_REP_ACK, NULL, 0);
	if (a->shut)
		shutdown(fd, SHUT_WR);
	hear_close(fd);
}

static void expect_script_error(void (*script)(int fd, void *arg), void *arg, int code,
				const char *words)
{
	struct server server;
	const struct iswi_tcp_config config = server_config(&server, script, arg);

	expect_error(&config, code, words);
	server_join(&server);
}

TEST(check_answers)
{
	static char old[152], not_fixed[NBD_GREETING_BYTES], too_long[NBD_OPTION_REPLY_BYTES];
	static const struct answer answers[] = {
		{-ECONNRESET, "closed the connection", .bytes = "", .shut = true},
		{-EPROTO, "does not speak the NBD protocol", .bytes = "SSH-2.0\r\n", .count = 9},
		{-EPROTO, "does not speak the NBD protocol",
		 .bytes = "HTTP/1.1 400 Bad Request\r\n\r\n", .count = 28},
		{-EPROTO, "old style", .bytes = old, .count = sizeof(old)},
		{-EPROTO, "fixed newstyle", .bytes = not_fixed, .count = sizeof(not_fixed)},
		{-ECONNRESET, "closed the connection", .bytes = not_fixed, .count = 8,
		 .shut = true},
		{-ENOENT, "does not accept the ticket", .type = NBD_REP_ERR_UNKNOWN,
		 .payload = NO_NAME},
		{-EACCES, "TLS", .type = NBD_REP_ERR_TLS_REQD, .payload = NO_NAME},
		{-EOPNOTSUPP, "GO", .type = NBD_REP_ERR_UNSUP, .payload = NO_NAME},
		{-ECONNRESET, "shutting down", .type = NBD_REP_ERR_SHUTDOWN, .payload = NO_NAME},
		{-EPROTO, "0x80001234", .type = 0x80001234u, .payload = NO_NAME},
		{-ERANGE, "are needed", GRANTED(EXPORT_BYTES - 1)},
		{-EROFS, "read-only", .size = EXPORT_BYTES, .block_min = 1,
		 .flags = NBD_FLAG_HAS_FLAGS | NBD_FLAG_READ_ONLY},
		{-EOPNOTSUPP, "pages", .size = EXPORT_BYTES, .block_min = 65536,
		 .flags = NBD_FLAG_HAS_FLAGS},
		{-EOPNOTSUPP, "requests of 4097 bytes at most", GRANTED(EXPORT_BYTES),
		 .block_max = 4097},
		{-EOPNOTSUPP, "must take 1048576", GRANTED(EXPORT_BYTES),
		 .block_max = (1u << 20) - 1},
		{-EPROTO, "without a size", .type = NBD_REP_ACK},
		{-EPROTO, "too long", .bytes = too_long, .count = sizeof(too_long), .go = true},
		{-EPROTO, "wrong length", .type = NBD_REP_INFO, .payload = "\0\0\0", .count = 3},
		{-EPROTO, "another option", .bytes = "not an option's reply", .count = 21,
		 .go = true},
	};

	nbd_put64(old, NBD_MAGIC);
	nbd_put64(old + 8, NBD_OLDSTYLE_MAGIC);
	nbd_put64(old + 16, EXPORT_BYTES);
	nbd_put64(not_fixed, NBD_MAGIC);
	nbd_put64(not_fixed + 8, NBD_OPTION_MAGIC);
	nbd_put_option_reply(too_long, NBD_OPT_GO, NBD_REP_INFO, UINT32_MAX);
	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(answers); i++)
		expect_script_error(answer, (void *)(uintptr_t)&answers[i], answers[i].code,
				    answers[i].words);
}

static void reply_without_end(int fd, void *arg)
{
	(void)arg;
	if (!server_greet(fd) || !server_take_go(fd))
		return;
	while (server_info_export(fd, EXPORT_BYTES, NBD_FLAG_HAS_FLAGS))
		;
}

/* Replies that nobody asked for are passed over. */
static void grant_chatty(int fd, void *arg)
{
	(void)arg;
	if (server_greet(fd) && server_take_go(fd) &&
	    server_option_reply(fd, NBD_REP_INFO, "\0\2describes", 11) &&
	    server_option_reply(fd, NBD_REP_INFO, "\1\0later", 7) &&
	    server_info_export(fd, EXPORT_BYTES, NBD_FLAG_HAS_FLAGS))
		server_option_reply(fd, NBD_REP_ACK, NULL, 0);
	hear_close(fd);
}

TEST(check_reply_without_end)
{
	expect_script_error(reply_without_end, NULL, -EPROTO, "no end");
}

TEST(check_nobody_there)
{
	struct server server;
	struct iswi_tcp_config config;

	server_listen(&server, AF_INET);
	close(server.listen_fd);
	config = client_config(server.port);
	expect_error(&config, -ECONNREFUSED, "refused the connection");
}

TEST(check_silence)
{
	struct server server;
	struct iswi_tcp_config config;

	/* Accepted by the kernel, then nobody says a word. */
	server_listen(&server, AF_INET);
	config = client_config(server.port);
	config.connect_ms_max = 150;
	expect_error(&config, -ETIMEDOUT, "sent nothing");
	close(server.listen_fd);
}

TEST(check_config)
{
	static char long_name[NBD_NAME_BYTES_MAX + 2];
	struct iswi_tcp_config configs[5];
	static const char *const words[] = {"depth", "depth", "requests", "name",
					    "no such host.invalid"};

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(configs); i++)
		configs[i] = client_config(0);
	configs[0].depth = 0;
	configs[1].depth = ISWI_TCP_DEPTH_MAX + 1;
	configs[2].request_ms_max = 0;
	memset(long_name, 'x', sizeof(long_name) - 1);
	configs[3].export_name = long_name;
	configs[4].host = words[4];
	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(configs); i++)
		expect_error(&configs[i], i == 4 ? -ENXIO : -EINVAL, words[i]);
}

/* The last may skip. */
TEST_CASES(check_connects, 3, n)
{
	static const char *const hosts[] = {"127.0.0.1", "localhost", "::1"};
	struct server server = {.script = grant_chatty};
	struct client client;
	struct iswi_tcp_config config;

	server_listen(&server, n < 2 ? AF_INET : AF_INET6);
	CHECK_EQ(pthread_create(&server.thread, NULL, server_main, &server), 0);
	config = client_config(server.port);
	config.host = hosts[n];
	client_connect(&client, &config);
	client_destroy(&client);
	CHECK_EQ(client.down_error, -ESHUTDOWN);
	server_join(&server);
}
