//! Cross-origin access for browsers: everything is allowed, the token is what protects.

use axum::{
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{
    header::{
        ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
        ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
        ACCESS_CONTROL_REQUEST_METHOD, VARY,
    },
    HeaderMap, HeaderValue, Method, StatusCode,
};

/// Seconds for which a browser may remember a preflight; browsers cut it to two hours.
const MAX_AGE: &str = "7200";

/// Answers preflights, before any look at tokens, and adds the headers to every other answer.
pub async fn allow_all(request: Request, next: Next) -> Response {
    let asked = request.headers();
    if request.method() == Method::OPTIONS && asked.contains_key(ACCESS_CONTROL_REQUEST_METHOD) {
        // "*" does not cover `Authorization`, so what is asked for is echoed.
        let allowed = asked
            .get(ACCESS_CONTROL_REQUEST_HEADERS)
            .cloned()
            .unwrap_or_else(|| HeaderValue::from_static("*"));
        let mut response = StatusCode::NO_CONTENT.into_response();
        let headers = response.headers_mut();
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, allowed);
        headers.insert(
            ACCESS_CONTROL_ALLOW_METHODS,
            HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"),
        );
        headers.insert(ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static(MAX_AGE));
        headers.append(
            VARY,
            HeaderValue::from_static("Access-Control-Request-Headers"),
        );
        allow_origin(headers);
        return response;
    }
    let mut response = next.run(request).await;
    let headers = response.headers_mut();
    headers.insert(
        ACCESS_CONTROL_EXPOSE_HEADERS,
        HeaderValue::from_static(
            "Location, Cache-Control, X-Content-Type-Options, Content-Disposition",
        ),
    );
    allow_origin(headers);
    response
}

fn allow_origin(headers: &mut HeaderMap) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
}
